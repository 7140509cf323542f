"""A scaling study: laws of the loss and of the best hyperparameters, and what the runs do not determine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.scaling import laws, measurements, optima
from experiments.studies.scaling.measurements import GridPlace, Measurements, ScalingError


def study(
    losses: Sequence[Mapping[str, Any]], swept: Sequence[Mapping[str, Any]], seed: int, draws: int
) -> dict[str, Any]:
    """Everything that scaling.json says, ready for JSON.

    Laws of the loss are fitted to `losses`, rows of a sweep, at its best hyperparameters, those of the best
    hyperparameters to `swept`, or if that is empty to the same; `seed` and `draws` are of the bootstrap.

    Raises:
      ScalingError: a row lacks its parameters, tokens or learners, or no row has a loss.
    """
    reported = measurements.read_rows(losses)
    choosing = measurements.read_rows(swept) if swept else reported
    best = measurements.best(reported.losses)
    rows = loss_rows(best)
    return {
        "without_loss": reported.without_loss + (choosing.without_loss if swept else 0),
        "laws": fit_laws(best, seed, draws),
        "losses": rows,
        "gap_trend": fit_gap_trend(rows),
        "hyperparameters": fit_hyperparameters(choosing.losses, seed, draws),
    }


def fit_laws(losses: Measurements, seed: int, draws: int) -> list[dict[str, Any]]:
    """Every law of the losses, of the decoupled runs together and of each number of learners alone."""
    decoupled = {place: values for place, values in losses.items() if place.learners}
    along = measurements.with_most_tokens(decoupled)
    cases = [(name, law, decoupled if "D" in law.distinct else along) for name, law in laws.LAWS.items()]
    along = measurements.with_most_tokens(losses)
    for learners in sorted({place.learners for place in along}):
        alone = {place: values for place, values in along.items() if place.learners == learners}
        cases.append((f"M={learners} alone" if learners else "data-parallel", laws.SINGLE, alone))
    return [_fit_law(name, law, own, seed, draws) for name, law, own in cases]


def loss_rows(losses: Measurements) -> list[dict[str, Any]]:
    """The mean losses by place, and their distance above data-parallel's of the same N and D."""
    baseline = {(p.params, p.tokens): measurements.mean(v) for p, v in losses.items() if not p.learners}
    rows = []
    for place in sorted(losses, key=lambda place: (place.params, place.tokens, place.learners)):
        values, reference = list(losses[place].values()), baseline.get((place.params, place.tokens))
        mean = measurements.mean(losses[place])
        rows.append(
            {
                "params": place.params,
                "tokens": place.tokens,
                "learners": place.learners,
                "loss": mean,
                "spread": float(np.std(values, ddof=1)) if len(values) > 1 else None,
                "gap": mean / reference - 1 if reference and place.learners else None,
            }
        )
    return rows


def fit_gap_trend(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the gap in `loss_rows` goes with parameters and tokens, or why the runs do not determine it."""
    try:
        return {"name": "gap", "problem": None, **gap_trend(rows)}
    except ScalingError as error:
        return {"name": "gap", "problem": str(error)}


def gap_trend(losses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slopes of the gap in `loss_rows` by log N and by log D, each `(slope, standard error)`.

    Least squares over runs with several learners, with a constant for each number. The errors are a
    jackknife's, which leaves out one (N, D) after another: gaps at one share the loss they are held against.

    Raises:
      ScalingError: there are no gaps, or with one (N, D) less they do not tell log N from log D.
    """
    rows = [row for row in losses if row["gap"] is not None and row["learners"] > 1]
    if not rows:
        raise ScalingError("needs runs with several learners, and of data-parallel beside them")
    slopes = _slopes(rows)
    places = sorted({(row["params"], row["tokens"]) for row in rows})
    left = [_slopes([row for row in rows if (row["params"], row["tokens"]) != place]) for place in places]
    errors = np.sqrt((len(places) - 1) * np.var(left, axis=0))
    by_params, by_tokens = np.stack([slopes, errors], axis=1).tolist()
    return {"learners": sorted({row["learners"] for row in rows}), "params": by_params, "tokens": by_tokens}


def fit_hyperparameters(losses: Measurements, seed: int, draws: int) -> list[dict[str, Any]]:
    """The best values of each hyperparameter that was swept, and their laws; data-parallel has its own."""
    found = []
    for name in optima.NAMES:
        best = optima.find(losses, name)
        for baseline in (False, True):
            values = {place: v for place, v in best.values.items() if baseline is (not place.learners)}
            at_edge = sum(baseline is (not place.learners) for place in best.at_edge)
            if values or at_edge:
                entry = {"data_parallel": baseline, "at_edge": at_edge}
                found.append({**entry, **_fit_best(losses, name, values, seed, draws)})
    return found


def _fit_law(name: str, law: laws.Law, losses: Measurements, seed: int, draws: int) -> dict[str, Any]:
    entry = {"name": name, "formula": law.formula, "learners": sorted({place.learners for place in losses})}
    try:
        fitted = laws.fit(law, losses)
    except ScalingError as error:
        return {**entry, "problem": str(error)}
    return {
        **entry,
        "problem": None,
        "parameters": fitted.parameters,
        "theta": list(fitted.theta),
        "residual": fitted.residual,
        "intervals": _or_none(lambda: laws.intervals(law, losses, np.random.default_rng(seed), draws)),
        "held_out": _or_none(lambda: laws.hold_out_largest(law, losses)),
    }


def _fit_best(
    losses: Measurements, name: str, values: Mapping[GridPlace, float], seed: int, draws: int
) -> dict[str, Any]:
    kept = sorted(values, key=lambda place: (place.params, place.learners))
    entry = {"name": name, "title": optima.NAMES[name]}
    entry["values"] = [
        {"params": p.params, "tokens": p.tokens, "learners": p.learners, "value": values[p]} for p in kept
    ]
    try:
        fitted = optima.fit_optima(values)
    except ScalingError as error:
        return {**entry, "problem": str(error)}
    return {
        **entry,
        "problem": None,
        "formula": fitted.law.formula,
        "parameters": fitted.parameters,
        "residual": fitted.residual,
        "intervals": _or_none(
            lambda: optima.intervals(losses, name, kept, np.random.default_rng(seed), draws)
        ),
    }


def _or_none(figure: Callable[[], Any]) -> Any:
    """What a figure is, or None where the runs do not determine it."""
    try:
        return figure()
    except ScalingError:
        return None


def _slopes(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    learners = sorted({row["learners"] for row in rows})
    constants = [[float(row["learners"] == m) for m in learners] for row in rows]
    logs = [[np.log(row["params"]), np.log(row["tokens"])] for row in rows]
    matrix = np.hstack([np.array(logs) - np.mean(logs, axis=0), constants])
    # Tokens are whole batches: what follows from N does so to a few parts in a thousand.
    if np.linalg.matrix_rank(matrix, tol=0.1) < 2 + len(learners):
        raise ScalingError("needs more sizes, and tokens that do not follow from them")
    return np.linalg.lstsq(matrix, np.array([row["gap"] for row in rows]), rcond=None)[0][:2]
