"""A learner of a run: `python -m experiments.learner --config=FILE --syncer=HOST:PORT --learner_id=N`."""

from __future__ import annotations

import pathlib
import signal
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
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", 0, "Which of the learner's processes this is, from 0.", lower_bound=0
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 1, "Processes of the learner, which share a mesh of all their devices.", lower_bound=1
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0 for the others; it takes the port after it, too."
)
_PROFILE = roles.define_profile()
roles.define_security()


def main(_) -> int:
    security = roles.security()
    import jax

    from ddiloco.launch import processes
    from ddiloco.remote.learner.follower import Follower
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
    place = _place()
    if place is not None and _SPARE.value:
        raise cli.UsageError("spare: cannot stand in for one of several processes of a learner")
    platform.prepare()
    if place is not None:
        place.join()
    stop, received = ending.stop_on_signals()
    assembly = assembly_of(with_steps_of_tokens(experiment))
    if place is not None and place.number:
        roles.name_process(f"learner {learner} host {place.number}")
        preempted = Follower(place, assembly, security, learner, address).run(stop)
        return _code(received, preempted)
    process = LearnerProcess(assembly, security, place)
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
    return _code(received, process.preempted)


def _place():
    """Which of the learner's processes this is; None: the only one."""
    from ddiloco.remote.learner.hosts import HostPlace
    from experiments.front.credentials import check_address

    number, count = _PROCESS_ID.value, _NUM_PROCESSES.value
    if number >= count:
        raise cli.UsageError(f"process_id: is {number}, but must be below num_processes, {count}")
    if count == 1:
        return None
    if _COORDINATOR.value is None:
        raise cli.UsageError("coordinator: is missing, but several processes need one")
    return HostPlace(number, count, check_address(_COORDINATOR.value, "coordinator"))


def _code(received, preempted) -> int:
    if received:
        return 128 + received[0]
    return 128 + signal.SIGTERM if preempted else 0


if __name__ == "__main__":
    cli.run(main)
