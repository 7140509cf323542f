"""Trains at each point of a grid: `python -m experiments.sweep --sweep="a.b=1,2;seed=0,1" --output=DIR`.

Each point is a run of `experiments.train` in a process of its own, in DIR/<point>; --jobs=N at a time. A point
whose run has finished is not run again, so that an interrupted sweep goes on where it was.

`--sweep=FILE.py[:ARGUMENT]` names a Python file with `get_sweep()`, a list of {setting: value}, for grids that
are no product; there the key `config` is the config file itself. With `--baseline="setting=value"`, or
BASELINE = {setting: value} in the file, the loss of every run is also held against the run with these settings
at the same place and seed.

Writes DIR/sweep.json, sweep.md and sweep.png. Runs that differ in their seed alone are taken together; the
first setting that is a number is the axis of the figure, and the other settings make its lines.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import cli, runs, series, sweep_figure

_CONFIG = flags.DEFINE_string(
    "config", "configs/dense.py", "Config file of every point, and its preset after a colon."
)
_SWEEP = flags.DEFINE_string(
    "sweep", None, "The grid, `a.b=1,2;c=3,4` for a product, or a file with get_sweep()."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the sweep.")
_BASELINE = flags.DEFINE_string("baseline", None, "Settings of the runs that all are held against: `a.b=1`.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1)

COLUMNS = (
    "eval_loss",
    "eval_accuracy",
    "train_loss",
    "mean_quorum",
    "num_params",
    "tokens_total",
    "tokens_per_second",
    "wall_seconds",
    "bytes_sent",
)


class Sweep(NamedTuple):
    """The points of a grid, in order, and the settings of the baseline among them, if there is one."""

    points: list[dict[str, Any]]
    baseline: dict[str, Any] | None = None


def main(_) -> int:
    if not _SWEEP.value or not _OUTPUT.value:
        raise cli.UsageError("sweep: give both --sweep and --output")
    output = pathlib.Path(_OUTPUT.value)
    sweep = load(_SWEEP.value, _BASELINE.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"output: {output}: {error.strerror}") from None

    def gather() -> list[dict[str, Any]]:
        workdirs = [(point, output / point_name(point)) for point in sweep.points]
        rows = [{**point, **figures(workdir)} for point, workdir in workdirs if runs.finished(workdir)]
        write(output, rows, sweep)
        return rows

    train(sweep.points, output, _JOBS.value, gather)
    print(report(gather(), sweep))
    print(f"{output}/sweep.json  {output}/sweep.md  {output}/sweep.png")
    return 0


def load(argument: str, baseline: str | None = None) -> Sweep:
    """The grid that `--sweep` and `--baseline` ask for.

    Raises:
      UsageError: the text is neither a grid nor a file with `get_sweep`, the function knows no such argument,
        or no point has the baseline's settings.
    """
    path, _, given = argument.partition(":")
    if not path.endswith(".py"):
        sweep = Sweep(_product(argument))
    else:
        module = cli.load_module(path, "sweep")
        function = getattr(module, "get_sweep", None)
        if function is None:
            raise cli.UsageError(f"sweep: {path}: has no get_sweep()")
        if given and not inspect.signature(function).parameters:
            raise cli.UsageError(f"sweep: {argument}: its get_sweep() takes no argument")
        try:
            sweep = Sweep(function(given) if given else function(), getattr(module, "BASELINE", None))
        except ValueError as error:
            raise cli.UsageError(f"sweep: {argument}: {error}") from None
    if baseline:
        sweep = sweep._replace(baseline=dict(_setting(text, "baseline") for text in baseline.split(";")))
    if sweep.baseline and not any(series.is_of(point, sweep.baseline) for point in sweep.points):
        settings = ";".join(f"{name}={value}" for name, value in sweep.baseline.items())
        raise cli.UsageError(f"baseline: no point of the sweep has {settings}")
    return sweep


def point_name(point: Mapping[str, Any]) -> str:
    """A folder name that tells the point."""
    return runs.folder_name(",".join(f"{name}={value}" for name, value in point.items()))


def train(
    points: Sequence[Mapping[str, Any]], output: pathlib.Path, jobs: int, ended: Callable[[], object]
) -> None:
    """Runs the points that have not finished, and calls `ended` after each; a failing one ends the sweep.

    Raises:
      UsageError: a run failed; its own message stands above.
    """
    left = [(i, point) for i, point in enumerate(points) if not runs.finished(output / point_name(point))]
    commands = []
    for _, point in left:
        overrides = tuple((name, value) for name, value in point.items() if name != "config")
        config = point.get("config", _CONFIG.value)
        commands.append(runs.Run(config, overrides, output / point_name(point)).command())

    def tell(place: int) -> None:
        i, point = left[place]
        print(f"[{i + 1}/{len(points)}] {point_name(point)}", file=sys.stderr, flush=True)

    def note(place: int, status: int) -> None:
        if status:
            raise cli.UsageError(f"sweep: the point {point_name(left[place][1])} failed")
        ended()

    runs.run_all(commands, jobs, tell, note)


def figures(workdir: pathlib.Path) -> dict[str, Any]:
    """The columns of a finished run; None where its summary has none."""
    summary = runs.read_summary(workdir)
    return {name: summary.get(name) for name in COLUMNS}


def report(rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> str:
    """The tables: of means over seeds and gaps, where there are any, and of every run."""
    tables = [table(rows)]
    if sweep.baseline or len({row.get(series.SEED) for row in rows}) > 1:
        tables.insert(0, means_table(rows, sweep))
    return "\n\n".join(tables)


def means_table(rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> str:
    """A Markdown table of each point's figures, mean ± standard deviation over seeds, in the sweep's order.

    Where there is a baseline, `gap` is how much higher the loss is than the baseline's, seed by seed.
    """
    axes = _axes(sweep)
    measures = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    head = [
        *axes.lines,
        *([axes.x] if axes.x else []),
        "runs",
        *(["gap"] if sweep.baseline else []),
        *measures,
    ]
    cells = []
    for group in series.groups(rows, axes):
        settings = [str(group.rows[0].get(name, "")) for name in head[: len(axes.lines) + bool(axes.x)]]
        gap = []
        if sweep.baseline:
            gap = [100 * value for value in series.gaps(group, rows, axes, sweep.baseline, "eval_loss")]
            gap = [_spread(gap, "{:+.2f}", "{:.2f}", "%") if gap else "-"]
        figures = [_spread(group.values(name), "{:.5g}", "{:.2g}") for name in measures]
        cells.append([*settings, str(len(group.rows)), *gap, *figures])
    return runs.markdown(head, cells)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every run as a row of a Markdown table, best held-out loss first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [n for n in names if n not in COLUMNS or any(row.get(n) is not None for row in rows)]
    ordered = sorted(rows, key=_loss)
    return runs.markdown(names, [[_cell(row.get(name, "")) for name in names] for row in ordered])


def write(output: pathlib.Path, rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> None:
    """Writes what is known so far: sweep.json, sweep.md and sweep.png."""
    (output / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    (output / "sweep.md").write_text(report(rows, sweep) + "\n")
    sweep_figure.draw(output / "sweep.png", rows, _axes(sweep), sweep.baseline)


def _axes(sweep: Sweep) -> series.Axes:
    return series.axes_of(sweep.points, list(dict.fromkeys(name for point in sweep.points for name in point)))


def _product(text: str) -> list[dict[str, str]]:
    axes = []
    for axis in filter(None, text.split(";")):
        name, values = _setting(axis, "sweep")
        axes.append([(name, value.strip()) for value in values.split(",")])
    return [dict(point) for point in itertools.product(*axes)]


def _setting(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        form = "setting=value,value" if flag == "sweep" else "setting=value"
        raise cli.UsageError(f"{flag}: {text!r} is not of the form {form}")
    return name.strip(), value.strip()


def _spread(values: Sequence[float], form: str, spread_form: str, sign: str = "") -> str:
    found = series.mean_and_spread(values)
    if found is None:
        return "-"
    text = form.format(found[0]) + sign
    return text if len(values) < 2 else f"{text} ± {spread_form.format(found[1])}{sign}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _loss(row: Mapping[str, Any]) -> float:
    """A run's held-out loss; of one without arrays, which has none, infinity."""
    return math.inf if row["eval_loss"] is None else row["eval_loss"]


if __name__ == "__main__":
    cli.run(main)
