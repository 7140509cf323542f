"""Trains at each point of a grid: `python -m experiments.sweep --sweep="a.b=1,2;seed=0,1" --output=DIR`.

Each point is a run of `experiments.train` in a process of its own, in DIR/<point>. A point whose run has
finished is not run again, so that an interrupted sweep goes on where it was. `--sweep` may also name a Python
file with `get_sweep()`, a list of {setting: value}, for grids that are no product; there the key `config` is
the config file itself.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import sys

from absl import flags

from experiments import cli, runs

_CONFIG = flags.DEFINE_string(
    "config", "configs/dense.py", "Config file of every point, and its preset after a colon."
)
_SWEEP = flags.DEFINE_string(
    "sweep", None, "The grid, `a.b=1,2;c=3,4` for a product, or a file with get_sweep()."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the sweep.")

COLUMNS = ("eval_loss", "train_loss", "mean_quorum", "tokens_total", "tokens_per_second", "wall_seconds")


def main(_) -> int:
    if not _SWEEP.value or not _OUTPUT.value:
        raise cli.UsageError("sweep: give both --sweep and --output")
    output = pathlib.Path(_OUTPUT.value)
    points = load_points(_SWEEP.value)
    rows = []
    for i, point in enumerate(points):
        name = point_name(point)
        workdir = output / name
        if not runs.finished(workdir):
            print(f"[{i + 1}/{len(points)}] {name}", file=sys.stderr, flush=True)
            run(point, workdir)
        rows.append({**point, **figures(workdir)})
        write(output, rows)
    print(table(rows))
    print(f"{output}/sweep.json  {output}/sweep.md  {output}/sweep.png")
    return 0


def load_points(sweep: str) -> list[dict]:
    """The points of the grid, in order.

    Raises:
      UsageError: the text is neither a grid nor a file with `get_sweep`.
    """
    if sweep.endswith(".py"):
        return cli.load_module(sweep, "sweep").get_sweep()
    axes = []
    for axis in filter(None, sweep.split(";")):
        name, equals, values = axis.partition("=")
        if not equals or not name or not values:
            raise cli.UsageError(f"sweep: {axis!r} is not of the form setting=value,value")
        axes.append([(name.strip(), value.strip()) for value in values.split(",")])
    return [dict(point) for point in itertools.product(*axes)]


def point_name(point: dict) -> str:
    """A folder name that tells the point."""
    return runs.folder_name(",".join(f"{name}={value}" for name, value in point.items()))


def run(point: dict, workdir: pathlib.Path) -> None:
    """Runs one point; a failing one ends the sweep.

    Raises:
      UsageError: the run failed; its own message stands above.
    """
    overrides = tuple((name, value) for name, value in point.items() if name != "config")
    one = runs.Run(point.get("config", _CONFIG.value), overrides, workdir)

    def ended(_, status: int) -> None:
        if status:
            raise cli.UsageError(f"sweep: the point {point_name(point)} failed")

    runs.run_all([one.command()], 1, lambda _: None, ended)


def figures(workdir: pathlib.Path) -> dict:
    """The columns of a finished run."""
    summary = runs.read_summary(workdir)
    return {name: summary[name] for name in COLUMNS}


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, best held-out loss first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    ordered = sorted(rows, key=_loss)
    return runs.markdown(names, [[_cell(row.get(name, "")) for name in names] for row in ordered])


def write(output: pathlib.Path, rows: list[dict]) -> None:
    """Writes what is known so far: sweep.json, sweep.md and sweep.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (output / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    (output / "sweep.md").write_text(table(rows) + "\n")
    ordered = sorted(rows, key=_loss, reverse=True)
    labels = [point_name({k: v for k, v in row.items() if k not in COLUMNS}) for row in ordered]
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes.plot([_loss(row) for row in ordered], labels, "o")
    axes.set_xlabel("held-out loss (nats/token)")
    axes.grid(alpha=0.3)
    figure.savefig(output / "sweep.png", dpi=120)
    pyplot.close(figure)


def _cell(value) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _loss(row: dict) -> float:
    """A point's held-out loss; of a run without arrays, which has none, infinity."""
    return math.inf if row["eval_loss"] is None else row["eval_loss"]


if __name__ == "__main__":
    cli.run(main)
