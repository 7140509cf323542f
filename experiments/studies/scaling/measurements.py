"""What a scaling study measures: losses by size, tokens, learners and hyperparameters, one a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DATA_PARALLEL = ("data_parallel", "elastic_data_parallel")


class ScalingError(ValueError):
    """The measurements do not determine what is asked of them; the message is one line."""


@dataclasses.dataclass(frozen=True)
class GridPlace:
    """Where a loss was measured.

    Attributes:
      params: N, the model's parameters.
      tokens: D, of all learners together.
      learners: M; 0 of data-parallel training.
      inner_rate: the inner learning rate; None where the sweep leaves it alone.
      batch_tokens: the global batch, in tokens or in whatever unit `tokens` has; None likewise.
      outer_rate: the outer learning rate; None likewise.
    """

    params: int
    tokens: int
    learners: int
    inner_rate: float | None = None
    batch_tokens: float | None = None
    outer_rate: float | None = None


BySeed = Mapping[Any, float]  # held-out losses (nats/token) of one place
Measurements = Mapping[GridPlace, BySeed]


@dataclasses.dataclass(frozen=True)
class Study:
    """Measurements, and how many runs had no loss to measure."""

    losses: Measurements
    without_loss: int


def read_rows(rows: Sequence[Mapping[str, Any]]) -> Study:
    """The measurements of a sweep's rows, as `experiments.sweep` writes them to sweep.json.

    A hyperparameter is of the place only where the rows say it. Tokens that are within 2% of the next
    ones count as the same D, their mean: padding, and steps that are whole, make such differences. A
    place and seed that are there twice count once. Rows without a finite, positive loss are counted and
    left out.

    Raises:
      ScalingError: a row lacks its parameters, tokens or learners, or no row has a loss.
    """
    runs: list[tuple[GridPlace, float | None, Any, float]] = []  # tokens as they are, steps, seed, loss
    for i, row in enumerate(rows):
        loss = _number(row, "eval_loss", i)
        if loss is None or not math.isfinite(loss) or loss <= 0:
            continue
        params, tokens = _needed(row, "num_params", i), _needed(row, "tokens_total", i)
        baseline = row.get("algorithm") in DATA_PARALLEL
        place = GridPlace(
            int(params),
            round(tokens),
            0 if baseline else int(_needed(row, "sync.num_learners", i)),
            inner_rate=_number(row, "inner.learning_rate", i),
            outer_rate=_number(row, "outer.learning_rate", i),
        )
        runs.append((place, _number(row, "train.steps", i), row.get("seed"), loss))
    if not runs:
        raise ScalingError(f"the sweep has no loss: of {len(rows)} runs none has one")
    level = _levels(sorted({place.tokens for place, *_ in runs}))
    losses: dict[GridPlace, dict[Any, float]] = {}
    for i, (place, steps, seed, loss) in enumerate(runs):
        tokens = level[place.tokens]
        there = dataclasses.replace(place, tokens=tokens, batch_tokens=tokens / steps if steps else None)
        losses.setdefault(there, {})[i if seed is None else str(seed)] = loss
    return Study(losses, len(rows) - len(runs))


def mean(by_seed: BySeed) -> float:
    """The mean loss over seeds."""
    return float(np.mean(list(by_seed.values())))


def best(losses: Measurements) -> dict[GridPlace, BySeed]:
    """Of each size, tokens and learners the place with the hyperparameters of the lowest mean loss."""
    found: dict[tuple[int, int, int], tuple[GridPlace, BySeed]] = {}
    for place, by_seed in losses.items():
        key = (place.params, place.tokens, place.learners)
        if key not in found or mean(by_seed) < mean(found[key][1]):
            found[key] = place, by_seed
    return dict(found.values())


def with_most_tokens(losses: Measurements) -> dict[GridPlace, BySeed]:
    """Of each size the places with the most tokens: where a law has no D, D must go with N."""
    most: dict[int, int] = {}
    for place in losses:
        most[place.params] = max(place.tokens, most.get(place.params, 0))
    return {place: by_seed for place, by_seed in losses.items() if place.tokens == most[place.params]}


def redrawn(losses: Measurements, rng: np.random.Generator) -> dict[GridPlace, BySeed]:
    """A bootstrap sample: one set of seeds, drawn with replacement, at every place that has them.

    Runs of one seed have their start and their order of the data in common, as far as sizes and shards are
    alike, so that what a seed does is not drawn for each place anew. A place that has none of the seeds drawn
    keeps its own.

    Raises:
      ScalingError: no place has a second seed.
    """
    if all(len(values) < 2 for values in losses.values()):
        raise ScalingError("seeds: every place has one, so that nothing can be said about spread")
    seeds = list(dict.fromkeys(seed for by_seed in losses.values() for seed in by_seed))
    drawn = [seeds[i] for i in rng.integers(len(seeds), size=len(seeds))]
    return {
        place: {k: by_seed[seed] for k, seed in enumerate(drawn) if seed in by_seed} or by_seed
        for place, by_seed in losses.items()
    }


def _levels(ascending: Sequence[int]) -> dict[int, int]:
    """The mean of the run of close values that each value is in."""
    clusters: list[list[int]] = []
    for value in ascending:
        if clusters and value <= 1.02 * clusters[-1][-1]:
            clusters[-1].append(value)
        else:
            clusters.append([value])
    return {value: round(sum(cluster) / len(cluster)) for cluster in clusters for value in cluster}


def _needed(row: Mapping[str, Any], name: str, place: int) -> float:
    value = _number(row, name, place)
    if value is None or not math.isfinite(value) or value <= 0:
        raise ScalingError(f"row {place}: {name} is {row.get(name)!r}, but must be a number above 0")
    return value


def _number(row: Mapping[str, Any], name: str, place: int) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ScalingError(f"row {place}: {name} is {value!r}, but must be a number") from None
