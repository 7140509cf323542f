"""Shows what happened in a run: `python -m experiments.tape --workdir=DIR [--learner=2] [--around=ROUND]`."""

from __future__ import annotations

from absl import flags

from experiments.cli import program

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_LEARNER = flags.DEFINE_integer("learner", None, "Only this learner, and the syncer.", lower_bound=0)
_AROUND = flags.DEFINE_integer("around", None, "Only about the rounds of this global step.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 1, "Global steps before --around and after it.", lower_bound=0)


def main(_) -> int:
    from experiments.studies.replay import timeline
    from experiments.studies.replay.recorded import recorded

    if _AROUND.value is None:
        program.refuse_flags(["steps"], "has no use without --around")
    with recorded(program.required(_WORKDIR)) as run:
        lines = timeline.timeline(run.plan)
    for line in timeline.chosen(lines, _LEARNER.value, _AROUND.value, _STEPS.value):
        print(timeline.shown(line, run.experiment.driver == "virtual"))
    return 0


if __name__ == "__main__":
    program.run(main)
