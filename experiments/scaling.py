"""Fits scaling laws to sweeps: `python -m experiments.scaling --sweep=DIR[,DIR...] --output=DIR`.

The folders are those of `experiments.sweep` over configs/sweeps/scaling.py. Laws of the loss are fitted to
the first, at its best hyperparameters; those of the best hyperparameters to the others, which may have other
data, or to the first if it is alone. Laws with no D in them take of each size the runs with the most tokens.
The gap to data-parallel is extrapolated to --at parameters by two laws: where they differ, neither is known.

Writes scaling.json, scaling.md and scaling.png. What the runs do not determine gets a line of its own.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from absl import flags

from experiments.cli import program

_SWEEP = flags.DEFINE_list("sweep", None, "Folders with a sweep.json.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the tables and the figure.")
_DRAWS = flags.DEFINE_integer("draws", 200, "Bootstrap samples of the seeds.", lower_bound=1)
_AT = flags.DEFINE_float("at", 2e9, "Parameters that gaps are extrapolated to.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of these samples.", lower_bound=0)


def main(_) -> int:
    from experiments.studies import figures, results
    from experiments.studies.scaling import study
    from experiments.studies.scaling.measurements import ScalingError

    folders, output = program.required(_SWEEP), program.required(_OUTPUT)
    losses, *others = [read_sweep(pathlib.Path(folder)) for folder in folders]
    swept = [row for rows in others for row in rows]
    try:
        found = study.study(losses, swept, _SEED.value, _DRAWS.value, _AT.value)
    except ScalingError as error:
        raise program.UsageError(f"sweep: {error}") from None
    stem = program.ensure_folder("output", output) / "scaling"
    results.write(stem, found, study.report(found))
    figures.draw_scaling(stem.with_suffix(".png"), found)
    results.show(stem)
    return 0


def read_sweep(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a sweep; raises UsageError if the folder has no readable sweep.json."""
    path = folder / "sweep.json"
    try:
        with program.os_errors_as_usage("sweep", path):
            rows = json.loads(path.read_text())
    except ValueError:
        raise program.UsageError(f"sweep: {path}: is no JSON") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise program.UsageError(f"sweep: {path}: is not a list of runs")
    return rows


if __name__ == "__main__":
    program.run(main)
