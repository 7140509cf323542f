"""Tunes algorithms alike, then compares them at their best: `python -m experiments.tune --config=FILE.py`.

The file has `get_tuning()`, which returns

  {"grid": {setting: values}, "budget": points a row at most, "choosing": {setting: value},
   "together": settings that are moved at once as well as alone, as the rate goes with the batch,
   "rows": [{"label": ..., "preset": ..., "axes": (setting, ...), setting: value, "against": label}, ...]}

Each row climbs on the grid of its axes from the values that it has itself: the neighbours on one axis after
another, to where no neighbour has a lower held-out loss, or the budget is spent. `choosing` are settings of
these runs alone, such as another split; their seeds are --tuning_seeds. At its best point each row is then
trained with --seeds, which chose nothing, and its loss held against that of the row `against`, seed by seed.

A setting given here, --config.any.field=value, holds for every run. --jobs=N at a time; a run that has
finished with the same settings is not run again, so that the same command goes on where it was. Writes what
was chosen to DIR/chosen.json and chosen.md, and the rows at their best to tune.json, tune.md and tune.png.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

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
    planned: list[runs.PlannedRun] = []
    for row in plan.rows:  # before any run starts
        tuning.check_free(row, [name for name, _ in _GIVEN])
        for point in tuning.each_value(row):
            planned += _planned(row, point, plan.choosing, choosing, output).values()
    runs.refuse_idle(dict(_GIVEN), planned)
    program.ensure_folder("output", output)
    tuned, failed = _climbed(plan, choosing, output)
    print(tuning.choices(tuned))
    (output / "chosen.md").write_text(tuning.choices(tuned) + "\n")
    (output / "chosen.json").write_text(json.dumps(tuning.to_json(tuned), indent=2, allow_nan=False) + "\n")
    rows = []
    for one in tuned:
        by_seed = _planned(one.row, one.best, {}, reporting, output / "reported")
        rows.append(comparison.ComparisonRow(one.row.label, {}, by_seed, one.row.against))
    status = comparison.carry_out(rows, _JOBS.value, output, "tune")
    return runs.report_failed(failed) or status


Climb = Iterator[list[runs.PlannedRun]]


def _climbed(
    plan: tuning.TuningPlan, seeds: list[int], output: pathlib.Path
) -> tuple[list[tuning.Tuned], list[str]]:
    """The end of every row's climb, and the runs that failed on the way; rows climb side by side."""
    tuned: dict[str, tuning.Tuned] = {}
    waits: dict[str, Climb] = {}  # by run, the climb that goes on once it has no other here

    def on(climb: Climb) -> list[runs.PlannedRun]:
        """The runs that the next point lacks, of those at which some lack; empty at the climb's end."""
        for planned in climb:
            missing = [run for run in planned if run.lacks() is not None]
            if missing:
                waits.update({run.name: climb for run in missing})
                return missing
        return []

    def ended(run: runs.PlannedRun) -> list[runs.PlannedRun]:
        climb = waits.pop(run.name)
        return [] if climb in waits.values() else on(climb)

    climbs = [_climb(row, plan, seeds, output / "chosen", tuned) for row in plan.rows]
    failed = runs.train([run for climb in climbs for run in on(climb)], _JOBS.value, ended)
    return [tuned[row.label] for row in plan.rows if row.label in tuned], failed


def _climb(
    row: tuning.TuningRow,
    plan: tuning.TuningPlan,
    seeds: list[int],
    output: pathlib.Path,
    tuned: dict[str, tuning.Tuned],
) -> Climb:
    """A row's runs, point by point, by the losses of those before; what came of it goes into `tuned`."""
    climb = tuning.climb(list(row.axes.values()), row.start, plan.budget, row.together)
    point, tried = next(climb), []
    while row.label not in tuned:
        planned = list(_planned(row, point, plan.choosing, seeds, output).values())
        yield planned
        done = [results.read_summary(run.workdir) for run in planned if run.lacks() is None]
        losses = [summary["eval_loss"] for summary in done]
        whole = len(done) == len(seeds) and all(loss is not None for loss in losses)
        loss = statistics.mean(losses) if whole else math.inf
        tried.append(tuning.Tried(point, loss, sum(summary["tokens_total"] for summary in done)))
        try:
            point = climb.send(loss)
        except StopIteration as end:
            tuned[row.label] = tuning.Tuned(row, tried, end.value, plan.budget)


def _planned(
    row: tuning.TuningRow,
    point: tuning.Point,
    changes: Mapping[str, Any],
    seeds: list[int],
    output: pathlib.Path,
) -> dict[int, runs.PlannedRun]:
    """The runs of a row at a point, one for each seed."""
    path, at = _CONFIG.value.partition(":")[0], dict(zip(row.axes, point, strict=True))
    place = sweeps.point_name(at)
    settings = {**row.settings, **changes, **at}
    folder = output / runs.folder_name(row.label) / place
    config, overrides = f"{path}:{row.preset}", [*settings.items(), *_GIVEN]
    return runs.of_each_seed(f"{row.label} {place}", config, overrides, folder, seeds)


if __name__ == "__main__":
    program.run(main)
