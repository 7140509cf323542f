"""A learner of a run: `python -m experiments.learner --config=FILE --syncer=HOST:PORT --learner_id=N`."""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from experiments.front import cli, ending, roles

_CONFIG = cli.define_config("configs/dense.py")
_SYNCER = flags.DEFINE_string("syncer", "127.0.0.1:7070", "HOST:PORT of the syncer.")
_LEARNER_ID = flags.DEFINE_integer("learner_id", None, "Its number, from 0.", lower_bound=0)
_SPARE = flags.DEFINE_bool(
    "spare", False, "Compile all, then wait to be told NUMBER HOST:PORT in a line on standard input."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for its tape and copies of its inner optimizer state. Default: none are kept."
)
_PROFILE = roles.define_profile()
roles.define_security()


def main(_) -> int:
    security = roles.security()
    import jax

    from ddiloco.launch import processes
    from ddiloco.remote.learner.process import LearnerProcess
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import parse, with_steps_of_tokens
    from ddiloco.training import platform
    from experiments.front.credentials import check_address

    config = _CONFIG.value
    config.driver = "remote"
    experiment = parse(config)
    learner, address = _LEARNER_ID.value, check_address(_SYNCER.value, "syncer")
    if (learner is None) is not _SPARE.value:
        raise cli.UsageError("learner_id: give --learner_id=N, or --spare in its place")
    platform.prepare()
    stop, received = ending.stop_on_signals()
    process = LearnerProcess(assembly_of(with_steps_of_tokens(experiment)), security)
    if _SPARE.value:
        roles.name_process("spare")
        process.compile()
        words = sys.stdin.readline().split()
        if not words:  # the run has ended without need of it
            return 0
        learner, address = int(words[0]), check_address(words[1], "syncer")

    roles.name_process(f"learner {learner}")

    def note(line) -> None:
        cli.tell(f"learner {learner}: {line}")

    workdir = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None
    folder = workdir / "learners" / str(learner) if workdir is not None else None
    if _PROFILE.value and workdir is None:
        raise cli.UsageError("profile: needs --workdir, where the trace goes")
    profile = roles.profile(_PROFILE.value, workdir)
    stepping = processes.make_way if jax.default_backend() == "cpu" else lambda: None
    failure = process.run(learner, address, stop, note, folder, workdir, stepping, profile)
    if failure is not None:
        print(f"error: learner {learner}: {failure}", file=sys.stderr)
        return 1
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    cli.run(main)
