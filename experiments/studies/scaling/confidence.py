"""How far a law can be trusted: intervals by bootstrap over seeds, the error at a size it never saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies.scaling.laws import Law, fit
from experiments.studies.scaling.measurements import Measurements, ScalingError, largest, mean, redrawn

Interval = tuple[float, float]
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A law, fitted without the largest size, at that size.

    Attributes:
      params: the size.
      error: mean over its places of |log prediction - log mean loss|: 0.01 is 1%.
    """

    params: int
    error: float


def intervals(
    law: Law, losses: Measurements, rng: np.random.Generator, draws: int = 200
) -> dict[str, Interval]:
    """The 95% interval of each parameter of a fit, by the percentiles of a bootstrap over the seeds.

    Each draw has one set of seeds for all places, since a seed does alike to all of them. With three seeds
    the interval is too narrow, by about the root of 2/3; with one at every place there is none.

    Raises:
      ScalingError: the places do not determine the law, or none has a second seed.
    """
    if all(len(values) < 2 for values in losses.values()):
        raise ScalingError("seeds: every place has one, so that nothing can be said about spread")
    middle = fit(law, losses)
    return percentiles([fit(law, redrawn(losses, rng), middle.theta).parameters for _ in range(draws)])


def percentiles(drawn: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """The 95% interval of each figure over these draws of all."""
    tails = (100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2)
    return {name: tuple(np.percentile([one[name] for one in drawn], tails).tolist()) for name in drawn[0]}


def hold_out_largest(law: Law, losses: Measurements) -> HeldOut:
    """Fits the law without the largest size, and tells it about that one; may raise ScalingError."""
    size = largest(losses)
    seen = {place: values for place, values in losses.items() if place.params != size}
    unseen = {place: mean(values) for place, values in losses.items() if place.params == size}
    places = list(unseen)
    predicted = fit(law, seen).predict(places)
    errors = np.abs(np.log(predicted) - np.log(list(unseen.values())))
    return HeldOut(size, float(errors.mean()))
