"""Hyperparameters that are best at each size and number of learners, and their power laws.

After "Scaling Laws for DiLoCo" (arXiv 2503.09799): the lowest point of a parabola in the logarithm of the
hyperparameter, at each (N, M); then value = A N^alpha M^beta through these points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.studies.scaling.laws import BY_LEARNERS, LAWS, SINGLE, Fit, Interval, fit, percentiles
from experiments.studies.scaling.measurements import HYPERPARAMETERS, PLACE, ScalingError, means, redrawn

_REACH = 2  # values of the grid on each side of the best that a parabola goes through


def find(losses: pd.DataFrame, name: str) -> pd.DataFrame:
    """The best value of a hyperparameter at each place, wherever it has three values or more.

    Columns are PLACE, without a value of the hyperparameter itself, and `value`, the lowest point of the
    parabola; NaN where the lowest loss is at the end of the grid, since the best may lie beyond.
    """
    others, found = [column for column in PLACE if column != name], []
    ascending = means(losses.dropna(subset=name)).sort_values(name, kind="stable")
    for place, grid in ascending.groupby(others, sort=False, dropna=False):
        if len(grid) >= 3:
            found.append((*place, lowest(grid[name].to_numpy(), grid.loss.to_numpy())))
    best = pd.DataFrame(found, columns=[*others, "value"]).astype({"value": float})
    return best.assign(**{name: np.nan})


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


def fit_optima(optima: pd.DataFrame) -> Fit:
    """The power law of the best values, in what varies of N and M; may raise ScalingError."""
    sizes, learners = optima.params.unique(), optima.learners.unique()
    if len(sizes) < 2 and len(learners) < 2:
        raise ScalingError(f"best values: there are {len(optima)}, at one N and M, which make no law")
    law = LAWS["power"] if min(len(sizes), len(learners)) > 1 else SINGLE if len(sizes) > 1 else BY_LEARNERS
    if len(optima) <= len(law.parameters):
        problem = f"there are {len(optima)}, and {law.formula} goes through as many whether it holds or not"
        raise ScalingError(f"best values: {problem}")
    return fit(law, optima.assign(loss=optima.value))


def intervals(
    losses: pd.DataFrame, name: str, kept: pd.DataFrame, rng: np.random.Generator, draws: int = 200
) -> dict[str, Interval]:
    """The 95% interval of each parameter of `fit_optima`, by a bootstrap over seeds.

    `kept`: the best values that the law goes through. Of a draw in which one of their places has its best at
    the grid's edge the others are taken, and a draw that makes no law is left out.

    Raises:
      ScalingError: no place has a second seed, or no draw makes a law of the same form.
    """
    others = [column for column in PLACE if column != name]
    losses = losses.dropna(subset=name).merge(kept[others], on=others)
    form = fit_optima(find(losses, name).dropna(subset="value")).law
    figures = []
    for sample in redrawn(losses, rng, draws):
        try:
            fitted = fit_optima(find(sample, name).dropna(subset="value"))
        except ScalingError:
            continue
        if fitted.law is form:
            figures.append(fitted.parameters)
    if not figures:
        raise ScalingError(f"{HYPERPARAMETERS[name]}: no draw of the seeds makes a law")
    return percentiles(figures)
