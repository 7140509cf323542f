"""Tunes algorithms alike, then compares them at their best: `python -m experiments.tune --config=FILE.py`.

The file has `get_tuning()`, which returns

  {"grid": {setting: values}, "budget": points a row at most, "choosing": {setting: value},
   "together": settings that are moved at once as well as alone, as the rate goes with the batch,
   "rows": [{"label": ..., "preset": ..., "axes": (setting, ...), setting: value, "against": label}, ...]}

Each row is a hill climb on the grid of its axes: from the row's own values it tries the neighbours on one
axis after another, until no neighbour has a lower held-out loss or the budget is spent. `choosing` are
settings of these runs alone, such as another split; their seeds are --tuning_seeds. The best point of each
row is then trained with --seeds, which chose nothing, and its loss compared with that of the row `against`,
seed by seed.

A setting given here, --config.any.field=value, holds for every run; --jobs=N run at a time. A run that has
finished with the same settings is not run again, so the same command resumes. Writes the chosen points to
DIR/chosen.json and chosen.md, and the results at these points to tune.json, tune.md and tune.png.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics

from absl import flags

from experiments.cli import program
from experiments.studies import comparison, results, runs, sweeps, tuning

_CONFIG = flags.DEFINE_string("config", None, "File with get_tuning(), and its argument after a colon.")
_OUTPUT = flags.DEFINE_string("output", None, "Its folder. Default: runs/tune-FILE-ARGUMENT.")
_TUNING_SEEDS = flags.DEFINE_list("tuning_seeds", ["100"], "Seeds that choose.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds that are reported.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1)
_GIVEN = program.take_overrides()


def main(_) -> int:
    plan = tuning.plan_of(program.required(_CONFIG))
    choosing = runs.parse_seeds(_TUNING_SEEDS.value, "tuning_seeds")
    reporting = runs.parse_seeds(_SEEDS.value)
    if set(choosing) & set(reporting):
        raise program.UsageError("tuning_seeds: a seed that chooses must not be reported")
    output = pathlib.Path(_OUTPUT.value or runs.default_output("tune", _CONFIG.value))

    def at(row: tuning.TuningRow, point: tuning.Point) -> dict[int, runs.PlannedRun]:
        return _planned(row, point, {**row.settings, **plan.choosing}, choosing, output / "chosen")

    planned: list[runs.PlannedRun] = []
    for row in plan.rows:  # before any run starts
        tuning.check_free(row, [name for name, _ in _GIVEN])
        planned += [run for point in tuning.each_value(row) for run in at(row, point).values()]
    runs.refuse_idle(dict(_GIVEN), planned)
    program.ensure_folder("output", output)
    failed: list[str] = []

    def losses(points: list[tuple[tuning.TuningRow, tuning.Point]]) -> list[tuple[float, int]]:
        asked = [list(at(*point).values()) for point in points]
        failed.extend(runs.train([run for own in asked for run in own], _JOBS.value, lambda run: None))
        return [_loss(own) for own in asked]

    tuned = tuning.tune(plan, losses)
    print(tuning.choices(tuned))
    (output / "chosen.md").write_text(tuning.choices(tuned) + "\n")
    (output / "chosen.json").write_text(json.dumps(tuning.to_json(tuned), indent=2, allow_nan=False) + "\n")
    rows = []
    for one in tuned:
        by_seed = _planned(one.row, one.best, one.row.settings, reporting, output / "reported")
        row = {"label": one.row.label, "against": one.row.against, "paper": {}}
        rows += [({**row, "seed": seed}, run) for seed, run in by_seed.items()]
    status = results.carry_out(comparison.of_rows(rows), _JOBS.value, output / "tune")
    return runs.report_failed(failed) or status


def _loss(planned: list[runs.PlannedRun]) -> tuple[float, int]:
    """The mean loss of these runs, infinite if one has none, and their tokens."""
    done = [results.figures_of(run.workdir) for run in planned if run.lacks() is None]
    losses = [figures["eval_loss"] for figures in done]
    whole = len(done) == len(planned) and None not in losses
    return statistics.mean(losses) if whole else math.inf, sum(figures["tokens_total"] for figures in done)


def _planned(
    row: tuning.TuningRow, point: tuning.Point, settings: dict, seeds: list[int], output: pathlib.Path
) -> dict[int, runs.PlannedRun]:
    """The runs of a row at a point, one for each seed."""
    path, at = _CONFIG.value.partition(":")[0], dict(zip(row.axes, point, strict=True))
    place = sweeps.point_name(at)
    folder = output / runs.folder_name(row.label) / place
    overrides = [*{**settings, **at}.items(), *_GIVEN]
    return runs.of_each_seed(f"{row.label} {place}", f"{path}:{row.preset}", overrides, folder, seeds)


if __name__ == "__main__":
    program.run(main)
