"""Shows what happened in a run: `python -m experiments.tape --workdir=DIR [--learner=2] [--around=ROUND]`."""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from experiments.front import cli

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_LEARNER = flags.DEFINE_integer("learner", None, "Only this learner, and the syncer.", lower_bound=0)
_AROUND = flags.DEFINE_integer("around", None, "Only about the rounds of this global step.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 1, "Global steps before --around and after it.", lower_bound=0)


def main(_) -> int:
    from ddiloco.disk.tape.file import TapeError
    from ddiloco.disk.tape.reading import read_run
    from ddiloco.replay import run as replay
    from experiments.studies.replay import timeline

    if not _WORKDIR.value:
        raise cli.UsageError("workdir: is missing; give --workdir=DIR, the folder of a run")
    workdir = pathlib.Path(_WORKDIR.value)
    try:
        experiment = replay.recorded_experiment(workdir)
        tapes = read_run(workdir)
        plan = replay.make_plan(experiment, tapes)
    except TapeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for warning in tapes.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    lines = timeline.chosen(timeline.timeline(plan), _LEARNER.value, _AROUND.value, _STEPS.value)
    virtual = experiment.driver == "virtual"
    for line in lines:
        print(timeline.shown(line, virtual))
    return 0


if __name__ == "__main__":
    cli.run(main)
