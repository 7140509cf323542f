"""Trains at each point of a grid: `python -m experiments.sweep --sweep="a.b=1,2;seed=0,1" --output=DIR`.

Each point is a run of `experiments.train` in a process of its own, in DIR/<point>. A point whose run has
finished is not run again, so that an interrupted sweep goes on where it was. `--sweep` may also name a Python
file with `get_sweep()`, a list of {setting: value}, for grids that are no product; there the key `config` is
the config file itself.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys

from absl import flags

from experiments import cli

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
        if not finished(workdir):
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
    text = ",".join(f"{name}={value}" for name, value in point.items())
    return "".join(c if c.isalnum() or c in "=,._-" else "-" for c in text)


def finished(workdir: pathlib.Path) -> bool:
    """Whether the point's run has come to its end."""
    try:
        return bool(json.loads((workdir / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError):
        return False


def run(point: dict, workdir: pathlib.Path) -> None:
    """Runs one point; a failing one ends the sweep.

    Raises:
      UsageError: the run failed; its own message stands above.
    """
    config = point.get("config", _CONFIG.value)
    overrides = [f"--config.{name}={value}" for name, value in point.items() if name != "config"]
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        f"--config={config}",
        f"--workdir={workdir}",
        *overrides,
    ]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise cli.UsageError(f"sweep: the point {point_name(point)} failed")


def figures(workdir: pathlib.Path) -> dict:
    """The columns of a finished run."""
    summary = json.loads((workdir / "summary.json").read_text())
    summary["tokens_total"] = sum(summary["tokens"].values())
    return {name: summary[name] for name in COLUMNS}


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, best held-out loss first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in sorted(rows, key=lambda row: row["eval_loss"]):
        cells = [row.get(name, "") for name in names]
        lines.append("| " + " | ".join(f"{c:.5g}" if isinstance(c, float) else str(c) for c in cells) + " |")
    return "\n".join(lines)


def write(output: pathlib.Path, rows: list[dict]) -> None:
    """Writes what is known so far: sweep.json, sweep.md and sweep.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (output / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    (output / "sweep.md").write_text(table(rows) + "\n")
    ordered = sorted(rows, key=lambda row: row["eval_loss"], reverse=True)
    labels = [point_name({k: v for k, v in row.items() if k not in COLUMNS}) for row in ordered]
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes.plot([row["eval_loss"] for row in ordered], labels, "o")
    axes.set_xlabel("held-out loss (nats/token)")
    axes.grid(alpha=0.3)
    figure.savefig(output / "sweep.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    cli.run(main)
