"""Which settings of synchronisation fit a run: `python -m experiments.plan --workdir=DIR`.

Plays a dozen choices of H, codec, K and tau on the learners, links and merges of the recorded run, without
arrays. Prints what becomes of each, the flags to restart with, and what a thin, far or slow learner is worth.
The loss is a rough estimate (docs/results/merged_share.md). With a run of the virtual driver, or --config in
place of --workdir, the fleet is that of config.virtual. The plan is also written to plan.json in the workdir,
for the page.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

from absl import flags

from experiments.cli import program

_CONFIG = program.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; without it --config names a virtual run.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the figures to this JSON file.")


def main(_) -> int:
    from ddiloco.outer.encoding import traffic
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import BASELINES
    from ddiloco.telemetry.files import replacing
    from ddiloco.telemetry.trimming import PLAN
    from experiments.studies.planning import choices, table
    from experiments.studies.planning.worth import worth_of
    from experiments.studies.replay import what_if
    from experiments.studies.replay.recorded import recorded

    workdir, output = _WORKDIR.value, program.writable_file(_OUTPUT)
    if workdir and (program.config_arguments()[1:] or flags.FLAGS["config"].present):
        raise program.UsageError("config: has no use with --workdir, whose run has its own; leave it out")
    experiment = _as_it_is_now(workdir) if workdir else _CONFIG.experiment(driver="virtual")
    if experiment.algorithm in BASELINES:
        raise program.UsageError(f"config.algorithm: is {experiment.algorithm}, which merges nothing")
    begun = time.monotonic()
    layout = assembly_of(experiment).layout
    found = choices.choices(experiment)
    if experiment.driver == "virtual":
        fleet, run = choices.of_config(experiment, layout), None
        played = choices.play_all(fleet, found)
        worth = worth_of(fleet, found[0], played[0].outcome, experiment.max_learners)
    else:
        with recorded(workdir) as tapes:
            sizes = traffic(layout, experiment.outer)
            steps = choices.steps_to_play(experiment)
            fleet = choices.of_record(what_if.recorded_fleet(tapes.plan, sizes, steps), experiment, layout)
            run = choices.Played(found[0], what_if.recorded(tapes.plan, sizes))
            played = choices.play_all(fleet, found)
            worth = worth_of(fleet, found[0], played[0].outcome, experiment.max_learners)
    played += [one.narrow for one in worth if one.narrow is not None]
    plan = table.Plan(experiment, played, run, worth)
    print(plan.text)
    print(f"{len(played)} choices played in {time.monotonic() - begun:.0f} s")
    for path in filter(None, (output, workdir and pathlib.Path(workdir) / PLAN)):
        with (
            program.os_errors_as_usage("output" if path is output else "workdir", path),
            replacing(path) as new,
        ):
            new.write_text(json.dumps(plan.values, indent=2) + "\n")
    return 0


def _as_it_is_now(workdir: str):
    """The settings of the run in the folder, with the timing that was ordered last."""
    from ddiloco.settings.timing import timing_of
    from ddiloco.storage import durable, operator_orders
    from experiments.studies.replay.recorded import experiment_of

    experiment = experiment_of(workdir)
    timing = operator_orders.load(pathlib.Path(workdir) / durable.FOLDER).timing
    if not timing:
        return experiment
    sync = timing_of(experiment.sync, timing).applied_to(experiment.sync)
    return dataclasses.replace(experiment, sync=sync)


if __name__ == "__main__":
    program.run(main)
