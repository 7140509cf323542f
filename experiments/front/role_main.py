"""One role of a run as this process, from what it was told to its exit code: what every launcher calls."""

from __future__ import annotations

import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.launch.assignment import DONE, FAILED, LEARNER, PREEMPTED, REFUSED, SYNCER, Assignment
from ddiloco.observe.health import Health, serve
from ddiloco.observe.json_lines import speak_json
from ddiloco.observe.summary import read_summary
from ddiloco.remote.wire.security import Security
from ddiloco.settings.experiment import Experiment
from experiments.front import cli, ending, roles
from experiments.front.credentials import check_address

if TYPE_CHECKING:
    from ddiloco.page.actions import Actions
    from ddiloco.remote.learner.hosts import HostPlace
    from ddiloco.roles.assembly import Assembly


def role_main(
    assignment: Assignment,
    experiment: Experiment,
    security: Security,
    stop: threading.Event,
    received: Sequence[int] = (),
    *,
    finish: bool = False,
    profile: str | None = None,
    spare: Callable[[], Assignment | None] | None = None,
) -> int:
    """Runs one process of a run to its end; returns the exit code (`ddiloco/launch/assignment.py`).

    Args:
      assignment: which process of the run this is.
      experiment: the settings of the run, whose driver is "remote".
      security: what it shows to the others, and asks of them.
      stop: ends it early, with everything saved.
      received: the signals that have set `stop`.
      finish: a syncer only saves what was merged: all learners have left after their last step.
      profile: FIRST:LAST steps of which a learner takes a trace.
      spare: has a learner compile all, then call this for its assignment; it ends where there is none.

    Raises:
      ConfigError, DataError: a setting is impossible, or the syncer refuses the learner: exit code 2.
    """
    from ddiloco.training import platform

    if experiment.log.json:
        run = None if assignment.workdir is None else assignment.workdir.name
        learner = assignment.learner if assignment.role == LEARNER else None
        speak_json(run=run, role=assignment.role, learner=learner)
    health = Health()
    if assignment.health:
        serve(check_address(assignment.health, "health"), health)
    platform.prepare()
    if assignment.role == SYNCER:
        return _syncer(assignment, experiment, security, stop, received, health, finish)
    if assignment.role == LEARNER:
        return _learner(assignment, experiment, security, stop, received, health, profile, spare)
    return _evaluator(assignment, experiment, stop, received, health)


def exit_code(
    assignment: Assignment, experiment: Experiment, security: Security, stop: threading.Event
) -> int:
    """What `role_main` returns, where errors of the settings are a code too: for engines that call it."""
    try:
        return role_main(assignment, experiment, security, stop)
    except (ConfigError, DataError, cli.UsageError) as error:
        cli.tell(f"error: {assignment.name}: {error}")
        return REFUSED


def _syncer(
    assignment: Assignment,
    experiment: Experiment,
    security: Security,
    stop: threading.Event,
    received: Sequence[int],
    health: Health,
    finish: bool,
) -> int:
    from ddiloco.disk.durable import FOLDER, DurableStateError
    from ddiloco.disk.run_mark import RunMarkError
    from ddiloco.page.visitors import Visitors, check_page
    from ddiloco.remote.syncer.listening import Listening, take_descriptors
    from ddiloco.remote.syncer.process import run_syncer
    from ddiloco.remote.wire.security import check_reach
    from ddiloco.run.job import run_job
    from ddiloco.settings.experiment import with_steps_of_tokens
    from ddiloco.training import platform

    address = check_address(assignment.syncer, "listen")
    check_reach(address, security)
    actions = _actions(security)
    visitors = Visitors(security.admits_token if security.asks else None, security.tls, actions)
    check_page(experiment.log.page, visitors)
    workdir = assignment.workdir
    if assignment.resume is None and _is_over(workdir, with_steps_of_tokens(experiment)):
        cli.tell(
            f"the run in {workdir} is over"
        )  # an engine that starts everything again, also after the end
        return DONE
    take_descriptors()
    platform.compute_on_cpu()  # whatever accelerators there are, they are for learners
    roles.name_process(assignment.name)
    learners = range(experiment.most_learners)
    listening = Listening(
        address, security, experiment.remote, sum(map(experiment.hosts, learners)), health.ready.set
    )
    runner = functools.partial(
        run_syncer,
        listening=listening,
        security=security,
        folder=workdir / FOLDER,
        alone=finish,
        actions=actions,
    )
    live, resume = ending.is_live(), assignment.resume
    try:
        result = run_job(
            experiment, workdir, stop, live, runner, resume, claim=listening.claim, visitors=visitors
        )
    except (DurableStateError, RunMarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return ending.tell(result, workdir, received)


def _actions(security: Security) -> Actions | None:
    """What the run's page may have it do: by the token that manages the run, where there are no credentials
    by a secret of the page, and where certificates alone say who somebody is nothing."""
    from ddiloco.page.actions import Actions

    if security.managed:
        return Actions(security.admits_manager)
    return None if security.asks or security.tls is not None else Actions()


def _is_over(workdir: pathlib.Path, experiment: Experiment) -> bool:
    """Whether the run has come to all of these steps, with everything saved."""
    summary = read_summary(workdir / "summary.json")
    step = summary.get("step")
    return summary.get("finished") is True and isinstance(step, int) and step >= experiment.train.steps


def _learner(
    assignment: Assignment,
    experiment: Experiment,
    security: Security,
    stop: threading.Event,
    received: Sequence[int],
    health: Health,
    profiled: str | None,
    spare: Callable[[], Assignment | None] | None,
) -> int:
    import jax

    from ddiloco.launch import processes
    from ddiloco.observe.profile import Watches
    from ddiloco.remote.learner.process import LearnerProcess
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import with_steps_of_tokens

    place = _place(assignment)
    if place is not None and spare is not None:
        raise cli.UsageError("spare: cannot stand in for one of several processes of a learner")
    if place is not None:
        place.join()
    assembly = assembly_of(with_steps_of_tokens(experiment))
    if place is not None and place.number:
        return _follower(assignment, place, assembly, security, stop, received, health)
    process = LearnerProcess(assembly, security, place)
    if spare is not None:
        roles.name_process("spare")
        process.compile()
        given = spare()
        if given is None:  # the run has ended without need of it
            return 0
        assignment = given
    learner, address = assignment.learner, check_address(assignment.syncer, "syncer")
    roles.name_process(assignment.name)

    def note(line: str) -> None:
        cli.tell(f"{assignment.name}: {line}")

    workdir = assignment.workdir
    folder = _folder(assignment)
    if profiled and workdir is None:
        raise cli.UsageError("profile: needs --workdir, where the trace goes")
    profile = roles.profile(profiled, workdir)
    health.waits = experiment.sync.max_run_ahead is not None
    watches = Watches([health] if profile is None else [health, profile])
    stepping = processes.make_way if jax.default_backend() == "cpu" else lambda: None
    failure = process.run(learner, address, stop, note, folder, workdir, stepping, watches)
    if failure is not None:
        print(f"error: {assignment.name}: {failure}", file=sys.stderr)
        return FAILED
    return _ended(received, process.preempted)


def _place(assignment: Assignment) -> HostPlace | None:
    """Which of the learner's hosts this process is; None: the only one."""
    if assignment.processes == 1:
        return None
    from ddiloco.remote.learner.hosts import HostPlace

    coordinator = check_address(assignment.coordinator, "coordinator")
    return HostPlace(assignment.process, assignment.processes, coordinator)


def _follower(
    assignment: Assignment,
    place: HostPlace,
    assembly: Assembly,
    security: Security,
    stop: threading.Event,
    received: Sequence[int],
    health: Health,
) -> int:
    from ddiloco.remote.learner.follower import Follower

    learner, address = assignment.learner, check_address(assignment.syncer, "syncer")
    roles.name_process(assignment.name)
    follower = Follower(place, assembly, security, learner, address, _folder(assignment))
    health.ready.set()
    return _ended(received, follower.run(stop))


def _folder(assignment: Assignment) -> pathlib.Path | None:
    """Where a learner keeps copies of its inner optimizer state; None: nowhere."""
    return None if assignment.workdir is None else assignment.workdir / "learners" / str(assignment.learner)


def _ended(received: Sequence[int], preempted: bool) -> int:
    """The exit code of a learner that did not fail; `preempted`: another of its processes had a signal."""
    if received:
        return 128 + received[0]
    return PREEMPTED if preempted else DONE


def _evaluator(
    assignment: Assignment,
    experiment: Experiment,
    stop: threading.Event,
    received: Sequence[int],
    health: Health,
) -> int:
    from ddiloco.remote.evaluator import EvaluatorProcess
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import with_steps_of_tokens

    roles.name_process(assignment.name)

    def note(line: str) -> None:
        cli.tell(f"{assignment.name}: {line}")

    workdir = assignment.workdir
    with cli.reaching("workdir", workdir):
        process = EvaluatorProcess(assembly_of(with_steps_of_tokens(experiment)), workdir, note)
        health.ready.set()
        process.run(stop)
    return 128 + received[0] if received else 0
