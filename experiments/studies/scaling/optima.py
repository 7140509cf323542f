"""Hyperparameters that are best at each size and number of learners, and their power laws.

After "Scaling Laws for DiLoCo" (arXiv 2503.09799): the lowest point of a parabola in the logarithm of the
hyperparameter, at each (N, M); then value = A N^alpha M^beta through these points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies.scaling.laws import LAWS, SINGLE, Fit, Interval, Law, fit, percentiles
from experiments.studies.scaling.measurements import GridPlace, Measurements, ScalingError, mean, redrawn

NAMES = {
    "inner_rate": "inner learning rate",
    "batch_tokens": "global batch",
    "outer_rate": "outer learning rate",
}
BY_LEARNERS = Law(
    "A M^beta",
    ("A", "beta"),
    {"M": 2},
    lambda t, n, d, m: t[0] + t[1] * m,
    lambda n, d, log_value: [(log_value, 0.0)],
)
_REACH = 2  # values of the grid on each side of the best that a parabola goes through


@dataclasses.dataclass(frozen=True)
class Optima:
    """The best values of one hyperparameter.

    Attributes:
      values: by place (with no value of the hyperparameter itself), the lowest point of the parabola.
      at_edge: places whose lowest loss is at the end of the grid: the best may lie beyond, so they have no
        value.
    """

    values: Mapping[GridPlace, float]
    at_edge: tuple[GridPlace, ...]


def find(losses: Measurements, name: str) -> Optima:
    """The best values of a hyperparameter, a key of `NAMES`, wherever it has three values or more."""
    grids: dict[GridPlace, dict[float, float]] = {}
    for place, values in losses.items():
        value = getattr(place, name)
        if value is not None:
            there = dataclasses.replace(place, **{name: None})
            grids.setdefault(there, {})[value] = mean(values)
    found, at_edge = {}, []
    for place, grid in grids.items():
        if len(grid) < 3:
            continue
        value = lowest(sorted(grid), [grid[x] for x in sorted(grid)])
        if value is None:
            at_edge.append(place)
        else:
            found[place] = value
    return Optima(found, tuple(at_edge))


def lowest(values: Sequence[float], losses: Sequence[float]) -> float | None:
    """Where a parabola in log(value) through the losses around the lowest is lowest; None at the grid's end.

    `values` ascend. The parabola goes through the best and two values on each side, as far as there are;
    where these bend the other way, through the best and its neighbours.
    """
    best = int(np.argmin(losses))
    if best in (0, len(values) - 1):
        return None
    for reach in (_REACH, 1):
        window = slice(max(0, best - reach), best + reach + 1)
        x = np.log(values[window])
        bend, slope, _ = np.polyfit(x - x.mean(), np.asarray(losses[window]), 2)
        if bend > 0:
            vertex = float(np.exp(x.mean() - slope / (2 * bend)))
            if values[best - 1] < vertex < values[best + 1]:
                return vertex
    return float(values[best])


def fit_optima(optima: Mapping[GridPlace, float]) -> Fit:
    """The power law of the best values, in what varies of N and M; may raise ScalingError."""
    places = list(optima)
    sizes, learners = {place.params for place in places}, {place.learners for place in places}
    if len(sizes) < 2 and len(learners) < 2:
        raise ScalingError(f"best values: there are {len(places)}, at one N and M, which make no law")
    law = LAWS["power"] if min(len(sizes), len(learners)) > 1 else SINGLE if len(sizes) > 1 else BY_LEARNERS
    if len(places) <= len(law.parameters):
        problem = f"there are {len(places)}, and {law.formula} goes through as many whether it holds or not"
        raise ScalingError(f"best values: {problem}")
    return fit(law, {place: {None: value} for place, value in optima.items()})


def intervals(
    losses: Measurements, name: str, kept: Sequence[GridPlace], rng: np.random.Generator, draws: int = 200
) -> dict[str, Interval]:
    """The 95% interval of each parameter of `fit_optima`, by a bootstrap over seeds.

    `kept`: the places whose best values the law goes through. Of a draw in which one of them has its best at
    the grid's edge the others are taken, and a draw that makes no law is left out.

    Raises:
      ScalingError: no place has a second seed, or no draw makes a law of the same form.
    """
    losses = {
        place: values
        for place, values in losses.items()
        if getattr(place, name) is not None and dataclasses.replace(place, **{name: None}) in kept
    }
    form = fit_optima(
        {place: value for place, value in find(losses, name).values.items() if place in kept}
    ).law
    figures = []
    for _ in range(draws):
        drawn = find(redrawn(losses, rng), name).values
        try:
            fitted = fit_optima({place: value for place, value in drawn.items() if place in kept})
        except ScalingError:
            continue
        if fitted.law is form:
            figures.append(fitted.parameters)
    if not figures:
        raise ScalingError(f"{NAMES[name]}: no draw of the seeds makes a law")
    return percentiles(figures)
