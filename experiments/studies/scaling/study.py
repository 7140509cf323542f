"""A scaling study: laws of the loss and of the best hyperparameters, and what the runs do not determine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.cli.tables import markdown
from experiments.studies.results import learners_name, or_none, over_baseline, plus_minus, table
from experiments.studies.scaling import laws, measurements, optima
from experiments.studies.scaling.measurements import HYPERPARAMETERS, SIZE, ScalingError

Entry = Mapping[str, Any]  # of `study`: a law, the trend of the gap, or a hyperparameter
_PARAMETERS = "parameters, 95% interval over seeds"


def study(
    losses: Sequence[Mapping[str, Any]], swept: Sequence[Mapping[str, Any]], seed: int, draws: int
) -> dict[str, Any]:
    """Everything that scaling.json says, ready for JSON.

    Laws of the loss are fitted to `losses`, rows of a sweep, at its best hyperparameters, those of the best
    hyperparameters to `swept`, or if that is empty to the same; `seed` and `draws` are of the bootstrap.

    Raises:
      ScalingError: a row lacks its parameters, tokens or learners, or no row has a loss.
    """
    reported, without_loss = measurements.read_rows(losses)
    choosing, also_without = measurements.read_rows(swept) if swept else (reported, 0)
    best = measurements.best(reported)
    rows = loss_rows(best)
    return {
        "without_loss": without_loss + also_without,
        "laws": fit_laws(best, seed, draws),
        "losses": rows,
        "gap_trend": fit_gap_trend(rows),
        "hyperparameters": fit_hyperparameters(choosing, seed, draws),
    }


def fit_laws(losses: pd.DataFrame, seed: int, draws: int) -> list[dict[str, Any]]:
    """Every law of the losses, of the decoupled runs together and of each number of learners alone."""
    decoupled, along = losses[losses.learners > 0], measurements.with_most_tokens(losses)
    most = measurements.with_most_tokens(decoupled)
    cases = [(name, law, decoupled if "D" in law.distinct else most) for name, law in laws.LAWS.items()]
    for learners, alone in along.groupby("learners"):
        cases.append((f"M={learners} alone" if learners else "data-parallel", laws.SINGLE, alone))
    return [_fit_law(name, law, own, seed, draws) for name, law, own in cases]


def loss_rows(losses: pd.DataFrame) -> list[dict[str, Any]]:
    """The mean losses by N, D and M, and how far they are above data-parallel's of the same N and D."""
    found = losses.groupby(SIZE)["loss"].agg(["mean", "std"]).reset_index()
    places = list(zip(found.params, found.tokens, found.learners == 0, strict=True))
    gaps = over_baseline(found["mean"], places, [(n, d, True) for n, d, _ in places]) - 1
    gaps[found.learners == 0] = np.nan
    found = found.rename(columns={"mean": "loss", "std": "spread"}).assign(gap=gaps)
    return [{name: or_none(x) for name, x in row.items()} for row in found.to_dict("records")]


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


def fit_hyperparameters(losses: pd.DataFrame, seed: int, draws: int) -> list[dict[str, Any]]:
    """The best values of each hyperparameter that was swept, and their laws; data-parallel has its own."""
    found = []
    for name in HYPERPARAMETERS:
        best = optima.find(losses, name)
        for baseline in (False, True):
            own = best[(best.learners == 0) == baseline]
            if len(own):
                entry = {"data_parallel": baseline, "at_edge": int(own.value.isna().sum())}
                values = own.dropna(subset="value")
                found.append({**entry, **_fit_best(losses, name, values, seed, draws)})
    return found


def _fit_law(name: str, law: laws.Law, losses: pd.DataFrame, seed: int, draws: int) -> dict[str, Any]:
    learners = sorted(losses.learners.unique().tolist())
    entry = {"name": name, "formula": law.formula, "learners": learners}
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


def _fit_best(losses: pd.DataFrame, name: str, values: pd.DataFrame, seed: int, draws: int) -> dict[str, Any]:
    kept = values.sort_values(["params", "learners"])[[*SIZE, "value"]]
    entry = {"name": name, "title": HYPERPARAMETERS[name], "values": kept.to_dict("records")}
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
            lambda: optima.intervals(losses, name, values, np.random.default_rng(seed), draws)
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


def report(found: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    laws, trend, best = found["laws"], found["gap_trend"], found["hyperparameters"]
    parts = [
        "## Loss",
        _laws_table(laws),
        *_problems(laws),
        _losses_table(found["losses"]),
        _gap_trend(trend),
        *_problems([trend]),
    ]
    if best:
        parts += ["## Best hyperparameters", _best_table(best), _best_laws_table(best), *_problems(best)]
    if found["without_loss"]:
        parts.append(f"{found['without_loss']} runs had no loss and are left out.")
    return "\n\n".join(filter(None, parts))


def _laws_table(laws: Sequence[Entry]) -> str:
    rows = []
    for law in laws:
        if not law["problem"]:
            held = law["held_out"]
            error = f"{held['error']:.2%} at N={held['params']:,}" if held else "-"
            rows.append([law["name"], law["formula"], _parameters(law), f"{law['residual']:.2%}", error])
    return table(["law", "loss", _PARAMETERS, "mean error", "error at the largest size, not seen"], rows)


def _losses_table(losses: Sequence[Entry]) -> str:
    """The mean losses, a column for each number of learners."""
    texts = {(row["params"], row["tokens"], row["learners"]): _loss(row) for row in losses}
    columns = sorted({learners for _, _, learners in texts})
    places = sorted({(n, d) for n, d, _ in texts})
    cells = [[f"{n:,}", f"{d:,}", *(texts.get((n, d, m), "-") for m in columns)] for n, d in places]
    return markdown(["parameters", "tokens", *map(learners_name, columns)], cells)


def _loss(row: Entry) -> str:
    text = plus_minus(row["loss"], row["spread"], ".4f")
    return text if row["gap"] is None else f"{text} ({100 * row['gap']:+.1f}%)"


def _gap_trend(trend: Entry) -> str:
    """How the gap goes with N and D, in points of percent."""
    if trend["problem"]:
        return ""
    slopes = (trend["params"], trend["tokens"])
    by_n, by_d = (f"{100 * slope:+.2f} ± {100 * error:.2f}" for slope, error in slopes)
    which = ", ".join(map(str, trend["learners"]))
    return (
        f"The gap of M = {which} goes by {by_n} points for each factor e of parameters, at equal tokens, and "
        f"by {by_d} for each of tokens (standard errors of a jackknife over sizes and lengths)."
    )


def _best_table(entries: Sequence[Entry]) -> str:
    rows = [
        [entry["title"], f"{best['params']:,}", learners_name(best["learners"]), f"{best['value']:.4g}"]
        for entry in entries
        for best in entry["values"]
    ]
    return table(["", "parameters", "", "best"], rows)


def _best_laws_table(entries: Sequence[Entry]) -> str:
    rows = [
        [
            _name(entry),
            entry["formula"],
            _parameters(entry),
            f"{100 * entry['residual']:.0f}%",
            f"{entry['at_edge']} of {entry['at_edge'] + len(entry['values'])}",
        ]
        for entry in entries
        if not entry["problem"]
    ]
    return table(["best", "law", _PARAMETERS, "mean error", "left out at the grid's edge"], rows)


def _problems(entries: Sequence[Entry]) -> list[str]:
    return [f"Not determined: {_name(entry)}: {entry['problem']}." for entry in entries if entry["problem"]]


def _name(entry: Entry) -> str:
    return entry.get("title", entry["name"]) + (", data-parallel" if entry.get("data_parallel") else "")


def _parameters(entry: Entry) -> str:
    texts = []
    for name, value in entry["parameters"].items():
        text = f"{name} = {value:.4g}"
        if entry["intervals"]:
            low, high = entry["intervals"][name]
            text += f" ({low:.4g} to {high:.4g})"
        texts.append(text)
    return ", ".join(texts)
