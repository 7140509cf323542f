"""Fits scaling laws to sweeps: `python -m experiments.scaling --sweep=DIR[,DIR...] --output=DIR`.

The folders are those of `experiments.sweep` over configs/sweeps/scaling.py. Laws of the loss are fitted to
the first, at its best hyperparameters; those of the best hyperparameters to all of them. Laws with no D in
them take of each size the runs with the most tokens.

Writes scaling.json, scaling.md and scaling.png. What the runs do not determine is told in a line of its own.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from experiments.front import cli
from experiments.studies import runs

_SWEEP = flags.DEFINE_list("sweep", None, "Folders with a sweep.json.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the tables and the figure.")
_DRAWS = flags.DEFINE_integer("draws", 200, "Bootstrap samples of the seeds.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of these samples.", lower_bound=0)


def main(_) -> int:
    from experiments.studies.scaling import figure as scaling_figure
    from experiments.studies.scaling import measurements

    if not _SWEEP.value or not _OUTPUT.value:
        raise cli.UsageError("scaling: give both --sweep and --output")
    sweeps = [read_sweep(pathlib.Path(folder)) for folder in _SWEEP.value]
    try:
        study = measurements.read_rows(sweeps[0])
        everything = measurements.read_rows([row for rows in sweeps for row in rows])
    except measurements.ScalingError as error:
        raise cli.UsageError(f"sweep: {error}") from None
    losses = measurements.best(study.losses)
    found = {
        "without_loss": everything.without_loss,
        "laws": fit_laws(losses, _SEED.value, _DRAWS.value),
        "losses": loss_rows(losses),
        "hyperparameters": fit_hyperparameters(everything.losses, _SEED.value, _DRAWS.value),
    }
    output = pathlib.Path(_OUTPUT.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"output: {output}: {error.strerror}") from None
    (output / "scaling.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    (output / "scaling.md").write_text(report(found) + "\n")
    scaling_figure.draw(output / "scaling.png", found)
    print(report(found))
    print(f"{output}/scaling.json  {output}/scaling.md  {output}/scaling.png")
    return 0


def read_sweep(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a sweep.

    Raises:
      UsageError: the folder has no readable sweep.json.
    """
    path = folder / "sweep.json"
    try:
        rows = json.loads(path.read_text())
    except OSError as error:
        raise cli.UsageError(f"sweep: {path}: {error.strerror}") from None
    except ValueError:
        raise cli.UsageError(f"sweep: {path}: is no JSON") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise cli.UsageError(f"sweep: {path}: is not a list of runs")
    return rows


def fit_laws(losses: Mapping[Any, Sequence[float]], seed: int, draws: int) -> list[dict[str, Any]]:
    """Every law of the losses, of the decoupled runs together and of each number of learners alone."""
    from experiments.studies.scaling import confidence, laws, measurements

    decoupled = {place: values for place, values in losses.items() if place.learners}
    along = measurements.with_most_tokens(losses)
    cases = []
    for name, law in laws.LAWS.items():
        cases.append(
            (name, law, decoupled if "D" in law.distinct else measurements.with_most_tokens(decoupled))
        )
    for learners in sorted({place.learners for place in along}):
        alone = {place: values for place, values in along.items() if place.learners == learners}
        cases.append((f"M={learners} alone" if learners else "data-parallel", laws.SINGLE, alone))
    found = []
    for name, law, own in cases:
        entry: dict[str, Any] = {"name": name, "formula": law.formula, "learners": None, "problem": None}
        entry["learners"] = sorted({place.learners for place in own})
        try:
            fitted = laws.fit(law, own)
        except measurements.ScalingError as error:
            found.append({**entry, "problem": str(error)})
            continue
        entry.update(parameters=fitted.parameters, theta=list(fitted.theta), residual=fitted.residual)
        entry["intervals"] = _or_none(
            lambda law=law, own=own: confidence.intervals(law, own, _rng(seed), draws)
        )
        held = _or_none(lambda law=law, own=own: confidence.hold_out_largest(law, own))
        entry["held_out"] = held and {"params": held.params, "error": held.error}
        found.append(entry)
    return found


def loss_rows(losses: Mapping[Any, Sequence[float]]) -> list[dict[str, Any]]:
    """The mean losses by place, and their distance above data-parallel's of the same N and D."""
    import numpy as np

    baseline = {(p.params, p.tokens): float(np.mean(v)) for p, v in losses.items() if not p.learners}
    rows = []
    for place, values in sorted(
        losses.items(), key=lambda item: (item[0].params, item[0].tokens, item[0].learners)
    ):
        mean, reference = float(np.mean(values)), baseline.get((place.params, place.tokens))
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


def fit_hyperparameters(losses: Mapping[Any, Sequence[float]], seed: int, draws: int) -> list[dict[str, Any]]:
    """The best values of each hyperparameter that was swept, and their laws; data-parallel has its own."""
    from experiments.studies.scaling import measurements, optima

    found = []
    for name, title in optima.NAMES.items():
        best = optima.find(losses, name)
        for baseline in (False, True):
            values = {place: v for place, v in best.values.items() if baseline is (not place.learners)}
            at_edge = sum(baseline is (not place.learners) for place in best.at_edge)
            if not values and not at_edge:
                continue
            entry: dict[str, Any] = {"name": name, "title": title, "data_parallel": baseline, "problem": None}
            entry["at_edge"] = at_edge
            entry["values"] = [
                {"params": place.params, "tokens": place.tokens, "learners": place.learners, "value": value}
                for place, value in sorted(
                    values.items(), key=lambda item: (item[0].params, item[0].learners)
                )
            ]
            try:
                fitted = optima.fit_optima(values)
            except measurements.ScalingError as error:
                found.append({**entry, "problem": str(error)})
                continue
            entry.update(formula=fitted.law.formula, parameters=fitted.parameters, residual=fitted.residual)
            entry["intervals"] = _or_none(
                lambda name=name, kept=list(values): optima.intervals(losses, name, kept, _rng(seed), draws)
            )
            found.append(entry)
    return found


def report(found: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    parts = ["## Loss", _laws_table(found["laws"]), *_problems(found["laws"]), _losses_table(found["losses"])]
    if found["hyperparameters"]:
        parts += ["## Best hyperparameters", _best_table(found["hyperparameters"])]
        parts += [_best_laws_table(found["hyperparameters"]), *_problems(found["hyperparameters"])]
    if found["without_loss"]:
        parts.append(f"{found['without_loss']} runs had no loss and are left out.")
    return "\n\n".join(filter(None, parts))


def _laws_table(laws: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for law in laws:
        if law["problem"]:
            continue
        held = law["held_out"]
        error = f"{100 * held['error']:.2f}% at N={held['params']:,}" if held else "-"
        rows.append([law["name"], law["formula"], _parameters(law), f"{100 * law['residual']:.2f}%", error])
    head = [
        "law",
        "loss",
        "parameters, 95% interval over seeds",
        "mean error",
        "error at the largest size, not seen",
    ]
    return runs.markdown(head, rows) if rows else ""


def _losses_table(rows: Sequence[Mapping[str, Any]]) -> str:
    learners = sorted({row["learners"] for row in rows})
    head = ["parameters", "tokens", *("data-parallel" if not m else f"M={m}" for m in learners)]
    places: dict[tuple[int, int], dict[int, str]] = {}
    for row in rows:
        text = f"{row['loss']:.4f}" + ("" if row["spread"] is None else f" ± {row['spread']:.4f}")
        text += "" if row["gap"] is None else f" ({100 * row['gap']:+.1f}%)"
        places.setdefault((row["params"], row["tokens"]), {})[row["learners"]] = text
    cells = [[f"{n:,}", f"{d:,}", *(texts.get(m, "-") for m in learners)] for (n, d), texts in places.items()]
    return runs.markdown(head, cells)


def _best_table(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            entry["title"],
            f"{value['params']:,}",
            "data-parallel" if entry["data_parallel"] else f"M={value['learners']}",
            f"{value['value']:.4g}",
        ]
        for entry in entries
        for value in entry["values"]
    ]
    return runs.markdown(["", "parameters", "", "best"], rows) if rows else ""


def _best_laws_table(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        if not entry["problem"]:
            title = entry["title"] + (", data-parallel" if entry["data_parallel"] else "")
            edge = f"{entry['at_edge']} of {entry['at_edge'] + len(entry['values'])}"
            error = f"{100 * entry['residual']:.0f}%"
            rows.append([title, entry["formula"], _parameters(entry), error, edge])
    head = ["best", "law", "parameters, 95% interval over seeds", "mean error", "left out at the grid's edge"]
    return runs.markdown(head, rows) if rows else ""


def _problems(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    told = []
    for entry in entries:
        if entry["problem"]:
            name = entry.get("title", entry["name"]) + (
                ", data-parallel" if entry.get("data_parallel") else ""
            )
            told.append(f"Not determined: {name}: {entry['problem']}.")
    return told


def _parameters(entry: Mapping[str, Any]) -> str:
    texts = []
    for name, value in entry["parameters"].items():
        text = f"{name} = {value:.4g}"
        if entry["intervals"]:
            low, high = entry["intervals"][name]
            text += f" ({low:.4g} to {high:.4g})"
        texts.append(text)
    return ", ".join(texts)


def _or_none(figure):
    """What a figure is, or None where the runs do not determine it."""
    from experiments.studies.scaling.measurements import ScalingError

    try:
        return figure()
    except ScalingError:
        return None


def _rng(seed: int):
    import numpy as np

    return np.random.default_rng(seed)


if __name__ == "__main__":
    cli.run(main)
