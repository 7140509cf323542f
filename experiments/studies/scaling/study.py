"""A scaling study: laws of the loss and of the best hyperparameters, and what the runs do not determine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.cli.tables import markdown
from experiments.studies.results import learners_name, or_none, over_baseline, plus_minus
from experiments.studies.scaling import laws, measurements, optima
from experiments.studies.scaling.measurements import HYPERPARAMETERS, SIZE, ScalingError

Entry = Mapping[str, Any]  # of `study`: a law, the trend of the gap, or a hyperparameter
_PARAMETERS = "parameters, 95% interval over seeds"


def study(
    losses: Sequence[Mapping[str, Any]],
    swept: Sequence[Mapping[str, Any]],
    seed: int,
    draws: int,
    at: float = 2e9,
) -> dict[str, Any]:
    """Everything that scaling.json says; what the runs do not determine has a `problem`.

    Laws of the loss are fitted to `losses`, rows of a sweep, at its best hyperparameters, those of the best
    hyperparameters to `swept`, or if that is empty to the same; `seed` and `draws` are of the bootstrap.
    Gaps are extrapolated to models of `at` parameters.

    Raises:
      ScalingError: a row lacks its parameters, tokens or learners, or no row has a loss.
    """
    reported, without_loss = measurements.read_rows(losses)
    choosing, also_without = measurements.read_rows(swept) if swept else (reported, 0)
    best, rng = measurements.best(reported), lambda: np.random.default_rng(seed)
    rows = loss_rows(best)
    return {
        "without_loss": without_loss + also_without,
        "laws": fit_laws(best, rng, draws),
        "losses": rows,
        "gap_trend": _determined({"name": "gap"}, lambda: gap_trend(rows)),
        "extrapolated": extrapolate(best, at, rng, draws),
        "hyperparameters": fit_hyperparameters(choosing, rng, draws),
    }


def _determined(entry: Entry, figures: Callable[[], Entry]) -> dict[str, Any]:
    """The entry with these figures, or with the `problem` why the runs do not determine them."""
    try:
        return {**entry, "problem": None, **figures()}
    except ScalingError as error:
        return {**entry, "problem": str(error)}


def _or_none(figure: Callable[[], Any]) -> Any:
    """What a figure is, or None where the runs do not determine it."""
    try:
        return figure()
    except ScalingError:
        return None


def fit_laws(
    losses: pd.DataFrame, rng: Callable[[], np.random.Generator], draws: int
) -> list[dict[str, Any]]:
    """Every law of the losses, of the decoupled runs together and of each number of learners alone."""
    decoupled, along = losses[losses.learners > 0], measurements.with_max_tokens(losses)
    most = measurements.with_max_tokens(decoupled)
    cases = [(name, law, decoupled if "D" in law.distinct else most) for name, law in laws.LAWS.items()]
    for learners, alone in along.groupby("learners"):
        cases.append((f"M={learners} alone" if learners else "data-parallel", laws.SINGLE, alone))

    def figures(law: laws.Law, own: pd.DataFrame) -> Entry:
        fitted = laws.fit(law, own)
        return {
            "parameters": fitted.parameters,
            "theta": list(fitted.theta),
            "residual": fitted.residual,
            "intervals": _or_none(lambda: laws.intervals(law, own, rng(), draws)),
            "held_out": _or_none(lambda: laws.hold_out_largest(law, own)),
        }

    found = []
    for name, law, own in cases:
        learners = sorted(own.learners.unique().tolist())
        entry = {"name": name, "formula": law.formula, "learners": learners}
        found.append(_determined(entry, lambda law=law, own=own: figures(law, own)))
    return found


def loss_rows(losses: pd.DataFrame) -> list[dict[str, Any]]:
    """The mean losses by N, D and M, and how far they are above data-parallel's of the same N and D."""
    found = losses.groupby(SIZE)["loss"].agg(["mean", "std"]).reset_index()
    places = list(zip(found.params, found.tokens, found.learners == 0, strict=True))
    gaps = over_baseline(found["mean"], places, [(n, d, True) for n, d, _ in places]) - 1
    gaps[found.learners == 0] = np.nan
    found = found.rename(columns={"mean": "loss", "std": "spread"}).assign(gap=gaps)
    return [{name: or_none(x) for name, x in row.items()} for row in found.to_dict("records")]


def gap_trend(losses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slopes of the gap in `loss_rows` by log N and by log D, each `(slope, standard error)`.

    Least squares over runs with several learners, with a constant for each number. The errors are a
    jackknife's, which leaves out one (N, D) after another: gaps at one share the loss they are held against.

    Raises:
      ScalingError: there are no gaps, or without one (N, D) log N and log D are collinear.
    """
    rows = pd.DataFrame(losses, columns=[*SIZE, "gap"]).astype(float).dropna()
    rows = rows[rows.learners > 1]
    if rows.empty:
        raise ScalingError("needs runs with several learners, and of data-parallel beside them")
    place = rows.groupby(["params", "tokens"]).ngroup()
    left = [_slopes(rows[place != one]) for one in place.unique()]
    errors = np.sqrt((len(left) - 1) * np.var(left, axis=0))
    by_params, by_tokens = np.stack([_slopes(rows), errors], axis=1).tolist()
    learners = sorted(rows.learners.astype(int).unique().tolist())
    return {"learners": learners, "params": by_params, "tokens": by_tokens}


def extrapolate(
    losses: pd.DataFrame, at: float, rng: Callable[[], np.random.Generator], draws: int
) -> list[dict[str, Any]]:
    """The gap of each number of learners at another size, with its interval over seeds, by `laws.gaps_at`."""
    along = measurements.with_max_tokens(losses)
    found = []
    for learners in sorted(set(along.learners) - {0}):
        own = along[along.learners.isin((0, learners))]

        def figures(own: pd.DataFrame = own) -> Entry:
            drawn = (laws.gaps_at(one, at) for one in measurements.redrawn(own, rng(), draws))
            intervals = _or_none(lambda: laws.percentiles([*drawn]))
            return {"gaps": laws.gaps_at(own, at), "intervals": intervals}

        entry = {"name": f"gap of M={learners} at N={at:.3g}", "learners": learners, "params": at}
        found.append(_determined(entry, figures))
    return found


def _slopes(rows: pd.DataFrame) -> np.ndarray:
    logs, constants = np.log(rows[["params", "tokens"]]), pd.get_dummies(rows.learners, dtype=float)
    matrix = np.hstack([logs - logs.mean(), constants])
    # Tokens are whole batches: what follows from N does so to a few parts in a thousand.
    if np.linalg.matrix_rank(matrix, tol=0.1) < matrix.shape[1]:
        raise ScalingError("needs more sizes, and tokens that do not follow from them")
    return np.linalg.lstsq(matrix, rows.gap.to_numpy(), rcond=None)[0][:2]


def fit_hyperparameters(
    losses: pd.DataFrame, rng: Callable[[], np.random.Generator], draws: int
) -> list[dict[str, Any]]:
    """The best values of each hyperparameter that was swept, and their laws; data-parallel has its own."""

    def figures(name: str, values: pd.DataFrame) -> Entry:
        fitted = optima.fit_optima(values)
        return {
            "formula": fitted.law.formula,
            "parameters": fitted.parameters,
            "residual": fitted.residual,
            "intervals": _or_none(lambda: optima.intervals(losses, name, values, rng(), draws)),
        }

    found = []
    for name, title in HYPERPARAMETERS.items():
        best = optima.find(losses, name)
        for baseline, own in best.groupby(best.learners == 0):
            values = own.dropna(subset="value").sort_values(["params", "learners"])
            entry = {
                "name": name,
                "title": title,
                "data_parallel": bool(baseline),
                "at_edge": len(own) - len(values),
                "values": values[[*SIZE, "value"]].to_dict("records"),
            }
            found.append(_determined(entry, lambda name=name, values=values: figures(name, values)))
    return found


def report(found: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    fitted, trend, best = found["laws"], found["gap_trend"], found["hyperparameters"]
    known = [law for law in fitted if not law["problem"]]
    parts = [
        "## Loss",
        _table(
            ["law", "loss", _PARAMETERS, "mean error", "error at the largest size, not seen"],
            [
                [x["name"], x["formula"], _parameters(x), f"{x['residual']:.2%}", _held_out(x["held_out"])]
                for x in known
            ],
        ),
        *_problems(fitted),
        _losses_table(pd.DataFrame(found["losses"])),
        "" if trend["problem"] else _gap_trend(trend),
        *_problems([trend]),
        _extrapolated([x for x in found["extrapolated"] if not x["problem"]]),
        *_problems(found["extrapolated"]),
    ]
    if best:
        values = [
            [x["title"], f"{at['params']:,}", learners_name(at["learners"]), f"{at['value']:.4g}"]
            for x in best
            for at in x["values"]
        ]
        of_laws = [
            [
                _name(x),
                x["formula"],
                _parameters(x),
                f"{100 * x['residual']:.0f}%",
                f"{x['at_edge']} of {x['at_edge'] + len(x['values'])}",
            ]
            for x in best
            if not x["problem"]
        ]
        head = ["best", "law", _PARAMETERS, "mean error", "left out at the grid's edge"]
        parts += ["## Best hyperparameters", _table(["", "parameters", "", "best"], values)]
        parts += [_table(head, of_laws), *_problems(best)]
    if found["without_loss"]:
        parts.append(f"{found['without_loss']} runs had no loss and are left out.")
    return "\n\n".join(filter(None, parts))


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(names, rows) if rows else ""


def _held_out(held: Mapping[str, Any] | None) -> str:
    return f"{held['error']:.2%} at N={held['params']:,}" if held else "-"


def _losses_table(losses: pd.DataFrame) -> str:
    """The mean losses, a column for each number of learners."""
    texts = [plus_minus(row.loss, row.spread, ".4f") for row in losses.itertuples()]
    gaps = losses.gap.astype(float).map(lambda gap: "" if np.isnan(gap) else f" ({100 * gap:+.1f}%)")
    cells = losses.assign(text=texts + gaps).pivot(
        index=["params", "tokens"], columns="learners", values="text"
    )
    rows = [
        [f"{n:,}", f"{d:,}", *row] for (n, d), row in zip(cells.index, cells.fillna("-").values, strict=True)
    ]
    return markdown(["parameters", "tokens", *map(learners_name, cells)], rows)


def _gap_trend(trend: Entry) -> str:
    """How the gap goes with N and D, in points of percent."""
    slopes = (trend["params"], trend["tokens"])
    by_n, by_d = (f"{100 * slope:+.2f} ± {100 * error:.2f}" for slope, error in slopes)
    which = ", ".join(map(str, trend["learners"]))
    return (
        f"The gap of M = {which} goes by {by_n} points for each factor e of parameters, at equal tokens, and "
        f"by {by_d} for each of tokens (standard errors of a jackknife over sizes and lengths)."
    )


def _extrapolated(entries: Sequence[Entry]) -> str:
    """The gaps at another size, where two laws tell how far they can be trusted."""
    if not entries:
        return ""

    def text(entry: Entry, name: str) -> str:
        gap, (low, high) = entry["gaps"][name], (entry["intervals"] or {}).get(name, (math.nan, math.nan))
        spread = "" if math.isnan(low) else f" ({100 * low:+.1f} to {100 * high:+.1f})"
        return "-" if math.isnan(gap) else f"{100 * gap:+.1f}%{spread}"

    rows = [[learners_name(x["learners"]), text(x, "losses"), text(x, "gaps")] for x in entries]
    names = [f"gap at N={entries[0]['params']:.3g}", "by each loss A N^alpha", "by the gap A N^alpha"]
    return markdown(names, rows)


def _problems(entries: Sequence[Entry]) -> list[str]:
    return [f"Not determined: {_name(entry)}: {entry['problem']}." for entry in entries if entry["problem"]]


def _name(entry: Entry) -> str:
    return entry.get("title", entry["name"]) + (", data-parallel" if entry.get("data_parallel") else "")


def _parameters(entry: Entry) -> str:
    texts = []
    for name, value in entry["parameters"].items():
        low, high = (entry["intervals"] or {}).get(name, (None, None))
        texts.append(f"{name} = {value:.4g}" + (f" ({low:.4g} to {high:.4g})" if low is not None else ""))
    return ", ".join(texts)
