"""What a scaling study measures: a table of losses by size, tokens, learners, hyperparameters and seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.studies.results import DATA_PARALLEL

HYPERPARAMETERS = {
    "inner_rate": "inner learning rate",
    "batch_tokens": "global batch",
    "outer_rate": "outer learning rate",
}
SIZE = ["params", "tokens", "learners"]
PLACE = [*SIZE, *HYPERPARAMETERS]
"""The columns of a place, where losses are measured, in every table of this folder:

params: N, the model's parameters.
tokens: D, of all learners together.
learners: M; 0 of data-parallel training.
inner_rate, outer_rate: learning rates; NaN where the sweep leaves them alone.
batch_tokens: the global batch, in tokens or in whatever unit `tokens` has; NaN likewise.
"""


class ScalingError(ValueError):
    """The measurements do not determine what is asked of them; the message is one line."""


def read_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[pd.DataFrame, int]:
    """The measurements of a sweep's rows, as `experiments.sweep` writes them: PLACE, seed, loss (nats/token).

    A hyperparameter is of the place only where rows have it. Tokens that are within 2% of the next
    ones count as the same D, their mean: padding, and steps that are whole, make such differences. A
    place and seed that are there twice count once. Rows without a finite, positive loss are left out, and
    counted.

    Raises:
      ScalingError: a row lacks its parameters, tokens or learners, or no row has a loss.
    """
    runs = []
    for i, row in enumerate(rows):
        loss = _number(row, "eval_loss", i)
        if loss is None or not math.isfinite(loss) or loss <= 0:
            continue
        baseline, seed = row.get("algorithm") in DATA_PARALLEL, row.get("seed")
        runs.append(
            {
                "params": int(_needed(row, "num_params", i)),
                "tokens": round(_needed(row, "tokens_total", i)),
                "learners": 0 if baseline else int(_needed(row, "sync.num_learners", i)),
                "inner_rate": _number(row, "inner.learning_rate", i),
                "batch_tokens": _number(row, "train.steps", i),
                "outer_rate": _number(row, "outer.learning_rate", i),
                "seed": f"run {i}" if seed is None else str(seed),
                "loss": loss,
            }
        )
    if not runs:
        raise ScalingError(f"the sweep has no loss: of {len(rows)} runs none has one")
    losses = pd.DataFrame(runs).astype(dict.fromkeys(HYPERPARAMETERS, float))
    tokens = pd.Series(sorted(losses.tokens.unique()))
    level = tokens.groupby((tokens > 1.02 * tokens.shift()).cumsum()).transform("mean").round().astype(int)
    losses["tokens"] = losses.tokens.map(dict(zip(tokens, level, strict=True)))
    losses["batch_tokens"] = losses.tokens / losses.batch_tokens
    return losses.drop_duplicates([*PLACE, "seed"], keep="last", ignore_index=True), len(rows) - len(runs)


def means(losses: pd.DataFrame) -> pd.DataFrame:
    """The mean loss of each place over its seeds; a table without seeds has means already."""
    if "seed" not in losses:
        return losses
    return losses.groupby(PLACE, sort=False, dropna=False, as_index=False)["loss"].mean()


def best(losses: pd.DataFrame) -> pd.DataFrame:
    """Of each size, tokens and learners the runs with the hyperparameters of the lowest mean loss."""
    of_place = means(losses)
    lowest = of_place.loc[of_place.groupby(SIZE)["loss"].idxmin(), PLACE]
    return losses.merge(lowest, on=PLACE)


def with_max_tokens(losses: pd.DataFrame) -> pd.DataFrame:
    """Of each size the runs with the most tokens: where a law has no D, D must go with N."""
    return losses[losses.tokens == losses.groupby("params")["tokens"].transform("max")]


def redrawn(losses: pd.DataFrame, rng: np.random.Generator, draws: int) -> Iterator[pd.DataFrame]:
    """Means of bootstrap samples, each of one set of seeds, sampled with replacement, at every place.

    Runs of one seed have their start and their order of the data in common, as far as sizes and shards are
    alike, so that what a seed does is not drawn for each place anew. A place that has none of the seeds drawn
    keeps its own.

    Raises:
      ScalingError: no place has a second seed.
    """
    place, seeds = losses.groupby(PLACE, sort=False, dropna=False).ngroup(), losses.seed.unique()
    table = losses.assign(place=place).pivot(index="place", columns="seed", values="loss")[seeds].to_numpy()
    known = ~np.isnan(table)
    if known.sum(axis=1).max() < 2:
        raise ScalingError("seeds: every place has one, so that the spread is unknown")
    whole = means(losses)
    for _ in range(draws):
        sampled = rng.integers(len(seeds), size=len(seeds))
        counts, sums = known[:, sampled].sum(axis=1), np.nansum(table[:, sampled], axis=1)
        yield whole.assign(loss=np.where(counts > 0, sums / np.maximum(counts, 1), whole.loss))


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
