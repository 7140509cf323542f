"""Trains at each point of a grid: `python -m experiments.sweep --sweep="a.b=1,2;seed=0,1" --output=DIR`.

Each point is a run of `experiments.train` in a process of its own, in DIR/<point>; --jobs=N at a time. A
point whose run has finished with the same settings is not run again, so that an interrupted sweep resumes
where it was. A setting that a point may not have is reported before any run starts. `--config.FIELD=VALUE`
is for all points, of a field in which they do not differ.

`--sweep=FILE.py[:ARGUMENT]` names a Python file with `get_sweep()`, a list of {setting: value}, for grids
that are no product; there the key `config` is the config file itself. With `--baseline="setting=value"`, or
BASELINE = {setting: value} in the file, the loss of every run is also held against the run that has these
settings at the same place and seed.

Writes DIR/sweep.json, sweep.md and sweep.png. Runs that differ in their seed alone are one row of the table;
the first setting that is a number is the axis of the figure, and the other settings make its lines. COLUMNS,
if the file has it, names the figures of the table in their order.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import program
from experiments.studies import figures, results, runs, sweeps

_CONFIG = flags.DEFINE_string(
    "config", "configs/dense.py", "Config file of every point, and its preset after a colon."
)
_SWEEP = flags.DEFINE_string(
    "sweep", None, "The grid, `a.b=1,2;c=3,4` for a product, or a file with get_sweep()."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the sweep.")
_BASELINE = flags.DEFINE_string("baseline", None, "Settings of the runs that all are held against: `a.b=1`.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1)
_GIVEN = program.take_overrides()


def main(_) -> int:
    folder = pathlib.Path(program.required(_OUTPUT))
    sweep = sweeps.with_settings(sweeps.load(program.required(_SWEEP), _BASELINE.value), _GIVEN)
    planned = []
    for given in sweep.points:
        name = sweeps.point_name(given)
        own = [(field, value) for field, value in given.items() if field != "config"]
        planned.append(runs.plan(name, given.get("config", _CONFIG.value), [*own, *_GIVEN], folder / name))
    if _CONFIG.present and all("config" in point for point in sweep.points):
        raise program.UsageError("config: each point of the sweep names its own; leave --config out")
    runs.refuse_idle(dict(_GIVEN), planned)
    if sweeps.is_product(_SWEEP.value):
        runs.refuse_idle(sweep.points[0], planned, "sweep: ")
    columns = results.SHOWN
    if not sweeps.is_product(_SWEEP.value):
        columns = results.columns_of(_SWEEP.value, "sweep")
    study = results.Study(
        sweep.points,
        planned,
        sweeps.axes_of(sweep.points).settings,
        lambda frame: sweeps.place(frame, sweep),
        lambda path, frame: figures.draw_sweep(path, frame, sweep),
        columns,
    )
    program.ensure_folder("output", folder)
    return results.carry_out(study, _JOBS.value, folder / "sweep")


if __name__ == "__main__":
    program.run(main)
