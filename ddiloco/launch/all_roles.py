"""All roles of a run as processes of this machine: the syncer, its learners and the spares."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from ddiloco.launch import processes, supervisor
from ddiloco.launch.assignment import PREFIX
from ddiloco.launch.ports import reserved_port
from ddiloco.settings.experiment import Experiment, task_of
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage import run_mark
from ddiloco.storage.durable import FOLDER

RESTARTED = ["--restarts=1"]  # what refuses a process that was started before may pass


def _begun(workdir: pathlib.Path, resume: bool) -> Callable[[], bool]:
    """Whether a run has begun in the workdir; with `resume` at any time, else since this was called."""

    def found() -> run_mark.RunMark | None:
        with contextlib.suppress(run_mark.RunMarkError):  # the syncer will say why
            return run_mark.begun(workdir / FOLDER)
        return None

    before = None if resume else found()
    return lambda: found() not in (None, before)


def _with_tokens(environment: Mapping[str, str], learners: int) -> dict[str, str]:
    """The environment with a token for each learner; a file would have to last as long as the run."""
    tokens = "".join(f"{m} {secrets.token_hex(24)}\n" for m in range(learners))
    kept = {name: value for name, value in environment.items() if name != f"{PREFIX}TOKEN_FILE"}
    return {**kept, f"{PREFIX}TOKEN": tokens}


def _shards(
    count: int, shared: Sequence[str], environment: Mapping[str, str], held: contextlib.ExitStack
) -> list[supervisor.Role]:
    """The roles of a syncer's shards beside the first, each with a port that is `held` for it."""
    return [
        supervisor.Role(
            f"shard {shard} of the syncer",
            "experiments.syncer",
            [*shared, f"--shard={shard}", f"--listen=127.0.0.1:{held.enter_context(reserved_port())}"],
            supervisor.syncer_environment(environment),
            RESTARTED,
        )
        for shard in range(1, count)
    ]


@dataclasses.dataclass(frozen=True)
class FailureStudy:
    """Hooks of a study of failures into a run's processes.

    Attributes:
      observe: as the supervisor's.
      route: from a learner and the syncer's HOST:PORT, the HOST:PORT that the learner connects to.
      played: by learner, a module that plays it in the place of experiments.learner; no spare replaces it.
    """

    observe: supervisor.Observe = lambda name, pid, code: None
    route: Callable[[int, str], str] = lambda learner, address: address
    played: Mapping[int, str] = dataclasses.field(default_factory=dict)


_NOTHING = FailureStudy()


def run_all(
    experiment: Experiment,
    config: Sequence[str],
    workdir: pathlib.Path,
    stop: threading.Event,
    note: Callable[[str], None],
    *,
    profile: str | None = None,
    study: FailureStudy = _NOTHING,
    resume: bool = False,
) -> int:
    """Runs them on the loopback, each learner with a token of its own; returns the exit code.

    Args:
      config: the same settings as program arguments, `--config=FILE` first.
      note: takes a line on what happens to the processes.
      profile: FIRST:LAST steps of which learner 0 takes a trace.
      study: what a study of failures sees and does.
      resume: whether the run in the workdir goes on.
    """
    count, played = experiment.most_learners, study.played
    processes.warm_up()
    with contextlib.ExitStack() as held:
        port = held.enter_context(reserved_port())
        address = f"127.0.0.1:{port}"
        environment = _with_tokens(os.environ, count)
        shared = [*config, f"--workdir={workdir}"]
        syncer = supervisor.Role(
            "the syncer",
            "experiments.syncer",
            [*shared, f"--listen={address}", *(["--resume"] if resume else [])],
            supervisor.syncer_environment(environment),
            again=["--resume", *RESTARTED],
            begun=_begun(workdir, resume),
            alone=["--finish"],
        )
        shards = _shards(experiment.syncer_shards, shared, environment, held)
        loop = isinstance(experiment.model, LoopConfig)
        scored = experiment.eval.every is not None or not (loop or not task_of(experiment).samples)
        profiled = [] if profile is None else [f"--profile={profile}"]
        learners = [
            supervisor.Role(
                f"learner {m}",
                played.get(m, "experiments.learner"),
                [
                    *shared,
                    f"--syncer={study.route(m, address)}",
                    f"--learner_id={m}",
                    *(profiled if m == 0 else []),
                ],
                supervisor.learner_environment(m, count, environment, hosts=experiment.hosts(m)),
                again=[] if m in played else RESTARTED,
                assignment="" if m in played else f"{m} {study.route(m, address)}",
                hosts=experiment.hosts(m),
            )
            for m in range(count)
        ]
        evaluator = supervisor.Role(
            "the evaluator",
            "experiments.evaluator",
            [*config, f"--workdir={workdir}"],
            supervisor.evaluator_environment(count, os.environ),
            RESTARTED,
        )
        spares = [
            supervisor.Role(
                f"spare {n}",
                "experiments.learner",
                [*shared, "--spare", *RESTARTED],  # it stands in for one
                supervisor.learner_environment(0, count, environment),
            )
            for n in range(experiment.remote.spares)
        ]
        roles = supervisor.Roles(syncer, learners, shards, spares, evaluator if scored else None)
        watched = supervisor.Supervisor(roles, experiment.remote, note, workdir, study.observe)
        return watched.run(stop)
