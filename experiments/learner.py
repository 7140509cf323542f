"""A learner of a run: `python -m experiments.learner --config=FILE --syncer=HOST:PORT --learner_id=N`."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from absl import flags

from experiments.cli import exit_handling, program, roles

_CONFIG = program.define_config("configs/dense.py")
_SYNCER = roles.define(flags.DEFINE_string, "syncer", "127.0.0.1:7070", "HOST:PORT of the syncer.")
_LEARNER_ID = roles.define(
    flags.DEFINE_integer, "learner_id", None, "Its number, from 0.", variable="learner", lower_bound=0
)
_SPARE = flags.DEFINE_bool(
    "spare", False, "Compile all, then wait for a line NUMBER HOST:PORT on standard input."
)
_WORKDIR = roles.define(
    flags.DEFINE_string,
    "workdir",
    None,
    "Folder for its tape and checkpoints. Default: it keeps none.",
)
_PROFILE = roles.define_profile()
roles.define_processes()
roles.define_role()
roles.define_security()


def main(_) -> int:
    security = roles.security()
    from experiments.cli.role_main import role_main

    experiment = _CONFIG.experiment(driver="remote")
    if (_LEARNER_ID.value is None) is not _SPARE.value:
        raise program.UsageError("learner_id: give --learner_id=N, or --spare in its place")
    if flags.FLAGS.processes == 1:
        program.refuse_flags(["coordinator"], "has no use without --processes, how many the learner has")
    assignment = roles.assignment(
        "learner",
        learner=_LEARNER_ID.value or 0,
        syncer=_SYNCER.value,
        workdir=pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None,
    )
    if assignment.processes > 1 and experiment.remote.min_hosts is None and not assignment.coordinator:
        raise program.UsageError("coordinator: give --coordinator=HOST:PORT of the learner's process 0")

    def assigned():
        words = sys.stdin.readline().split()
        return dataclasses.replace(assignment, learner=int(words[0]), syncer=words[1]) if words else None

    stop, received = exit_handling.stop_on_signals(assignment.grace)
    return role_main(
        assignment,
        experiment,
        security,
        stop,
        received,
        profile=_PROFILE.value,
        spare=assigned if _SPARE.value else None,
    )


if __name__ == "__main__":
    program.run(main, refused=roles.refused)
