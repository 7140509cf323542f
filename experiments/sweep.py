"""Trains at each point of a grid: `python -m experiments.sweep --sweep="a.b=1,2;seed=0,1" --output=DIR`.

Each point is a run of `experiments.train` in a process of its own, in DIR/<point>; --jobs=N at a time. A
point whose run has finished with the same settings is not run again, so that an interrupted sweep resumes
where it was; one that was interrupted continues, except in virtual time. A setting that a point may not have
is reported before any run starts. `--config.FIELD=VALUE` is for all points, of a field in which they do not
differ.

With --launcher=ray runs are tasks of a Ray cluster. With --launcher=slurm they are an array, which the first
call submits; the same call later shows what has come of it, and submits what is then left. All nodes share a
disk with DIR, the config files and the data.

`--sweep=FILE.py[:ARGUMENT]` names a Python file with `get_sweep()`, a list of {setting: value}, for grids
that are no product; there the key `config` is the config file itself. With `--baseline="setting=value"`, or
BASELINE = {setting: value} in the file, the loss of every run is also held against the run that has these
settings at the same place and seed.

Writes DIR/sweep.json, sweep.md, sweep.png, and sweep.html with all runs side by side. Runs that differ in
their seed alone are one row of the table; the first setting that is a number is the axis of the figure, and
the other settings make its lines. COLUMNS, if the file has it, names the figures of the table in their order.
"""

from __future__ import annotations

import os
import pathlib

from absl import flags

from experiments.cli import engines, program
from experiments.studies import figures, results, runs, sweeps

_CONFIG = flags.DEFINE_string(
    "config", "configs/dense.py", "Config file of every point, and its preset after a colon."
)
_SWEEP = flags.DEFINE_string(
    "sweep", None, "The grid, `a.b=1,2;c=3,4` for a product, or a file with get_sweep()."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the sweep.")
_BASELINE = flags.DEFINE_string("baseline", None, "Settings of the runs that all are held against: `a.b=1`.")
_ENGINES = ("local", "ray", "slurm")
_LAUNCHER = flags.DEFINE_enum("launcher", "local", _ENGINES, "Where runs are executed; local: here.")
_JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    "Runs at a time. Default: one here, and on an engine as many as there is room for.",
    lower_bound=1,
)
_ADDRESS = flags.DEFINE_string("address", None, "ray: of the cluster. Default: $RAY_ADDRESS, else one here.")
_CPUS = flags.DEFINE_float("cpus", 1.0, "ray: cores of a run.", lower_bound=0)
_GPUS = flags.DEFINE_float("gpus", 0.0, "ray: GPUs of a run.", lower_bound=0)
_OPTIONS = flags.DEFINE_string("options", "", "slurm: of sbatch, for a run's node.")
_SETUP = flags.DEFINE_string("setup", ":", "slurm: shell command that makes the environment.")
_NOTICE = flags.DEFINE_integer(
    "notice", 60, "slurm: seconds before its end that a job is signalled.", lower_bound=2
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "slurm: only write the array, and print the command.")
_GIVEN = program.take_overrides()


def main(_) -> int:
    engines.refuse_others(_LAUNCHER.value, _ENGINES)
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
    if _LAUNCHER.value == "slurm":
        return _on_slurm(study, folder)
    engine = _ray() if _LAUNCHER.value == "ray" else None
    jobs = _JOBS.value or (1 if engine is None else len(planned))
    return results.carry_out(study, jobs, folder / "sweep", engine)


def _ray() -> runs.Engine:
    try:
        import ray  # noqa: F401
    except ImportError:
        raise program.UsageError("launcher: ray is not installed; pip install 'ddiloco[ray]'") from None
    from experiments.studies.on_ray import RayCluster

    return RayCluster(_ADDRESS.value, _CPUS.value, _GPUS.value)


def _on_slurm(study: results.Study, folder: pathlib.Path) -> int:
    from ddiloco.launch.slurm import Nodes
    from experiments.studies import on_slurm

    study.write(folder / "sweep")
    if any(run.lacks() is None for run in study.planned):
        results.show(folder / "sweep")
    nodes = Nodes(os.getcwd(), _SETUP.value, _OPTIONS.value, _NOTICE.value, _JOBS.value)
    return on_slurm.submit(study.planned, nodes, folder / "slurm", _DRY_RUN.value)


if __name__ == "__main__":
    program.run(main)
