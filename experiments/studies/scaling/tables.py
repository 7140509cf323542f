"""The tables of a scaling study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli.tables import markdown

Entry = Mapping[str, Any]  # of `studies.scaling.study`: a law, the trend of the gap, or a hyperparameter

_PARAMETERS = "parameters, 95% interval over seeds"


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


def title(learners: int) -> str:
    """The name of runs with this number of learners; 0 stands for data-parallel training."""
    return f"M={learners}" if learners else "data-parallel"


def _laws_table(laws: Sequence[Entry]) -> str:
    rows = []
    for law in laws:
        if not law["problem"]:
            held = law["held_out"]
            error = f"{held['error']:.2%} at N={held['params']:,}" if held else "-"
            rows.append([law["name"], law["formula"], _parameters(law), f"{law['residual']:.2%}", error])
    return _table(["law", "loss", _PARAMETERS, "mean error", "error at the largest size, not seen"], rows)


def _losses_table(losses: Sequence[Entry]) -> str:
    """The mean losses, a column for each number of learners."""
    texts = {(row["params"], row["tokens"], row["learners"]): _loss(row) for row in losses}
    columns = sorted({learners for _, _, learners in texts})
    places = sorted({(n, d) for n, d, _ in texts})
    cells = [[f"{n:,}", f"{d:,}", *(texts.get((n, d, m), "-") for m in columns)] for n, d in places]
    return markdown(["parameters", "tokens", *map(title, columns)], cells)


def _loss(row: Entry) -> str:
    text = f"{row['loss']:.4f}" + ("" if row["spread"] is None else f" ± {row['spread']:.4f}")
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
        [entry["title"], f"{best['params']:,}", title(best["learners"]), f"{best['value']:.4g}"]
        for entry in entries
        for best in entry["values"]
    ]
    return _table(["", "parameters", "", "best"], rows)


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
    return _table(["best", "law", _PARAMETERS, "mean error", "left out at the grid's edge"], rows)


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


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(names, rows) if rows else ""
