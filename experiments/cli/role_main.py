"""One role of a run as this process, from its flags to its exit code: what every launcher calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from etils import epath

from ddiloco.config import ConfigError
from ddiloco.launch.assignment import DONE, FAILED, LEARNER, PREEMPTED, SYNCER, Assignment
from ddiloco.remote.wire.security import Security
from ddiloco.settings.experiment import Experiment
from ddiloco.storage.workdir import check_folder
from ddiloco.telemetry.json_lines import speak_json
from ddiloco.telemetry.records import reason
from ddiloco.telemetry.watches import Announcement, Health, serve
from experiments.cli import exit_handling, program, roles
from experiments.cli.credentials import check_address

if TYPE_CHECKING:
    from ddiloco.remote.learner.hosts import HostPlace
    from ddiloco.remote.syncer.listening import Listening
    from ddiloco.workers.assembly import Assembly


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
      security: its credentials, and those that it requires of others.
      stop: ends it early, with everything saved.
      received: the signals that have set `stop`.
      finish: a syncer only saves what was merged: all learners have left after their last step.
      profile: FIRST:LAST steps that a learner profiles.
      spare: has a learner compile all, then call this for its assignment; it ends where there is none.

    Raises:
      ConfigError, DataError: a setting is impossible, or the syncer refuses the learner: exit code 2.
    """
    from ddiloco.training import platform

    if experiment.log.json:
        run = None if assignment.workdir is None else assignment.workdir.name
        learner = assignment.learner if assignment.role == LEARNER else None
        speak_json(run=run, role=assignment.role, learner=learner)
    process = _Process(assignment, experiment, security, stop, received)
    if assignment.health:
        serve(check_address(assignment.health, "health"), process.health)
    if assignment.role == LEARNER:
        removed = platform.check_slices(experiment.mesh.slice, assignment.processes)
        if removed:
            program.print_err(f"a learner of one slice has no use for {', '.join(removed)}: removed")
    platform.prepare()
    if assignment.role == SYNCER:
        return process.shard() if assignment.shard else process.syncer(finish)
    return process.learner(profile, spare) if assignment.role == LEARNER else process.evaluator()


def exit_code(
    assignment: Assignment, experiment: Experiment, security: Security, stop: threading.Event
) -> int:
    """What `role_main` returns, where errors of the settings are a code too: for engines that call it."""
    try:
        return role_main(assignment, experiment, security, stop)
    except Exception as error:
        if (line := program.one_line(error)) is None:
            raise
        message, code = line
        program.print_err(f"error: {assignment.name}: {message}")
        return code


@dataclasses.dataclass
class _Process:
    """What each role's process has, and how it runs; each method returns the exit code."""

    assignment: Assignment
    experiment: Experiment
    security: Security
    stop: threading.Event
    received: Sequence[int]
    health: Health = dataclasses.field(default_factory=Health)
    share: int = 1  # one in so many of a learner's hosts are there
    regroups: bool = False  # whether it leaves to come back with more hosts

    def syncer(self, finish: bool) -> int:
        from ddiloco.dashboard.visitors import Visitors, check_page
        from ddiloco.remote.syncer.process import announce_end, run_syncer
        from ddiloco.remote.wire.security import check_reach
        from ddiloco.run.job import Hooks, run_job
        from ddiloco.run.recipes import with_steps_of_budget
        from ddiloco.run.rollback import going_on
        from ddiloco.storage import operator_orders
        from ddiloco.storage.durable import FOLDER, DurableStateError
        from ddiloco.storage.run_mark import RunMarkError

        experiment, security = self.experiment, self.security
        address = check_address(self.assignment.syncer, "listen")
        check_reach(address, security)
        visitors = Visitors(security.admits_token if security.asks else None, security.tls)
        check_page(experiment.log.page, visitors)
        workdir, resume = self.assignment.workdir, self.assignment.resume
        listening = self._listening(address)
        if resume is None and (over := _why_over(workdir, with_steps_of_budget(experiment).train.steps)):
            program.print_err(over)  # an engine starts everything again, also after the end
            run = {"listening": listening, "security": security, "folder": workdir / FOLDER}
            with contextlib.suppress(ConfigError, RunMarkError):
                announce_end(self._assembly(), **run)
            return DONE
        resume = going_on(resume, workdir, with_steps_of_budget(experiment), program.print_err)
        runner = functools.partial(
            run_syncer,
            listening=listening,
            security=security,
            folder=workdir / FOLDER,
            alone=finish,
            comes_back=lambda: exit_handling.comes_back(resume, self.received),
        )
        try:
            result = run_job(
                experiment,
                workdir,
                self.stop,
                runner,
                resume,
                visitors=visitors,
                hooks=Hooks(listening.claim, functools.partial(operator_orders.fail, workdir / FOLDER)),
            )
        except (DurableStateError, RunMarkError) as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        return exit_handling.print_result(result, workdir, self.received)

    def shard(self) -> int:
        """A syncer's process beside the first."""
        from ddiloco.remote.syncer.process import run_shard
        from ddiloco.remote.wire.security import check_reach
        from ddiloco.run import resources
        from ddiloco.storage.durable import FOLDER, DurableStateError
        from ddiloco.storage.run_mark import RunMarkError

        experiment, assignment = self.experiment, self.assignment
        if assignment.shard >= (shards := experiment.syncer_shards):
            raise program.UsageError(
                f"shard: is {assignment.shard}, but must be below {shards}, by config.remote.syncer_shards"
            )
        with program.os_errors_as_usage("workdir", assignment.workdir):
            check_folder(assignment.workdir / FOLDER)
        address = check_address(assignment.syncer, "listen")
        check_reach(address, self.security)
        assembly = self._assembly()
        if assignment.resume is None and (
            over := _why_over(assignment.workdir, assembly.experiment.train.steps)
        ):
            program.print_err(over)
            return DONE
        needs = resources.syncer_needs(experiment, assembly.layout, assignment.shard)
        resources.check_memory(needs, f"shard {assignment.shard} of the syncer")
        listening = self._listening(address)
        where = {"listening": listening, "security": self.security, "folder": assignment.workdir / FOLDER}
        try:
            failure = run_shard(assembly, self.stop, assignment.shard, **where)
        except (DurableStateError, RunMarkError) as error:
            failure = str(error)
        if failure is not None:
            print(f"error: shard {assignment.shard} of the syncer: {failure}", file=sys.stderr)
            return FAILED
        return 128 + self.received[0] if self.received else DONE

    def _listening(self, address: str) -> Listening:
        """The address of a process of the syncer; it computes on CPU."""
        from ddiloco.remote.syncer.listening import Listening, take_descriptors
        from ddiloco.training import platform

        take_descriptors()
        platform.compute_on_cpu()  # whatever accelerators there are, they are for learners
        roles.name_process(self.assignment.name)
        hosts, ready = self.experiment.max_hosts, self.health.ready.set
        return Listening(address, self.security, self.experiment.remote, hosts, ready)

    def learner(self, profiled: str | None, spare: Callable[[], Assignment | None] | None) -> int:
        if self.assignment.processes == 1:
            return self._train(None, profiled, spare)
        if spare is not None:
            raise program.UsageError("spare: cannot stand in for one of several processes of a learner")
        if self.experiment.remote.min_hosts is None:
            return self._train(_place(self.assignment, self.experiment.remote.host_timeout), profiled)
        return self._train_with_hosts_left(profiled)

    def _train_with_hosts_left(self, profiled: str | None) -> int:
        """As one of a learner's hosts that the syncer brings together, whichever are there."""
        from ddiloco.remote.learner.hosts import MET_SECONDS, HostPlace
        from ddiloco.remote.learner.rendezvous import HostPresence
        from ddiloco.storage.learner_state import mark_group

        a, config = self.assignment, self.experiment.remote
        if a.processes % (config.min_hosts or 1):
            problem = f"is {config.min_hosts}, but must divide the {a.processes} of --processes"
            raise ConfigError(f"config.remote.min_hosts: {problem}")
        if not (a.workdir or self.experiment.recovery.checkpoint_folder):
            raise program.UsageError("workdir: is missing, where hosts find each other's checkpoints")
        address, port = check_address(a.syncer, "syncer"), _own_port(a.coordinator)
        security = self.security.of(a.learner)

        def leave() -> None:
            self.regroups = True
            self.stop.set()

        roles.name_process(a.name)
        presence = HostPresence(a.learner, a.process, a.processes, address, security, config, port, leave)
        with contextlib.closing(presence):
            group = presence.group(self.stop)
            if group is None:
                return self._ended(False)
            count = len(group.hosts)
            self.share = a.processes // count
            if a.process == group.hosts[0]:
                folder = self._folder()
                with program.os_errors_as_usage("workdir", folder):
                    mark_group(folder, group.name)
            if count == 1:
                return self._train(None, profiled)
            at = group.coordinator, a.refused, config.host_timeout, MET_SECONDS, group.name
            return self._train(HostPlace(list(group.hosts).index(a.process), count, *at), profiled)

    def _train(
        self,
        place: HostPlace | None,
        profiled: str | None,
        spare: Callable[[], Assignment | None] | None = None,
    ) -> int:
        """As the learner, or as the one of its hosts that has this place."""
        import jax

        from ddiloco.launch import processes
        from ddiloco.remote.learner.process import LearnerOptions, LearnerProcess
        from ddiloco.run import resources

        if place is not None:
            place.join()
        ending = contextlib.nullcontext if place is None else place.ending
        with ending():
            self._check_fewest_hosts()
            assembly = self._assembly()
        if place is not None and place.number:
            return self._follow(place, assembly)
        process = LearnerProcess(assembly, self.security, place)
        if spare is not None:
            roles.name_process("spare")
            process.compile()
            given = spare()
            if given is None:  # the run has ended without need of it
                return 0
            self.assignment = given
        assignment, workdir = self.assignment, self.assignment.workdir
        address = check_address(assignment.syncer, "syncer")
        roles.name_process(assignment.name)
        hosts = 1 if place is None else place.count
        own = resources.learner_needs(self.experiment, assembly.layout, hosts)
        with ending():
            resources.check_memory(own, f"learner {assignment.learner}")
            folder = self._folder()
        if profiled and workdir is None:
            raise program.UsageError("profile: needs --workdir, where the trace goes")
        profile = roles.profile(profiled, workdir)
        watches = [self.health] if profile is None else [self.health, profile]
        if (often := self._often_started()) is not None:
            watches.append(Announcement(often))
        if self.share > 1:
            left = f"goes on with {hosts} of its {assignment.processes} hosts"
            watches.append(Announcement(f"{assignment.name} {left}"))
        stepping = processes.make_way if jax.default_backend() == "cpu" else lambda: None
        options = LearnerOptions(folder, workdir, stepping, watches, self._comes_back)
        failure = process.run(assignment.learner, address, self.stop, self._note, options)
        if failure is not None:
            print(f"error: {assignment.name}: {failure}", file=sys.stderr)
            return process.failure_code
        return self._ended(process.preempted)

    def _comes_back(self) -> bool:
        """Whether the order to end is for another number of hosts: no signal has given it."""
        fewer = self.assignment.processes > 1 and self.experiment.remote.min_hosts is not None
        return fewer and not self.received

    def _check_fewest_hosts(self) -> None:
        """Checks at the first start of all hosts, and not as some are lost, that few enough can go on."""
        import jax

        fewest = self.experiment.remote.min_hosts
        if fewest is not None and self.assignment.processes > 1:
            try:
                self.experiment.mesh.shape(fewest * jax.local_device_count())
            except ConfigError as error:
                raise ConfigError(f"config.remote.min_hosts: is {fewest}, too few: {error}") from None

    def _follow(self, place: HostPlace, assembly: Assembly) -> int:
        from ddiloco.remote.learner.follower import Follower

        address = check_address(self.assignment.syncer, "syncer")
        roles.name_process(self.assignment.name)
        a = self.assignment
        with place.ending():
            folder = self._folder()
            follower = Follower(place, assembly, self.security, a.learner, address, folder, a.workdir)
        self.health.ready.set()
        if (often := self._often_started()) is not None:
            follower.alarm(often)
        return self._ended(follower.run(self.stop))

    def evaluator(self) -> int:
        from ddiloco.remote.evaluator import EvaluatorProcess

        workdir = self.assignment.workdir
        roles.name_process(self.assignment.name)
        with program.os_errors_as_usage("workdir", workdir):
            check_folder(workdir / "evaluator")
            process = EvaluatorProcess(self._assembly(), workdir, self._note)
            self.health.ready.set()
            process.run(self.stop)
        return 128 + self.received[0] if self.received else 0

    def _assembly(self) -> Assembly:
        from ddiloco.run.recipes import assembly_of, with_steps_of_budget

        return assembly_of(with_steps_of_budget(self.experiment), share=self.share)

    def _note(self, line: str) -> None:
        program.print_err(f"{self.assignment.name}: {line}")

    def _often_started(self) -> str | None:
        """A sentence if an engine restarts this process of a learner on this node over and over."""
        from ddiloco.storage.starts import record_start

        a = self.assignment
        if a.workdir is None:
            return None
        try:
            return record_start(a.workdir / "starts" / f"{a.learner}.{a.process}", time.time())
        except OSError:  # of a full disk
            return None

    def _folder(self) -> epath.Path | None:
        """Where a learner keeps its checkpoints; None: nowhere."""
        from ddiloco.storage.learner_state import checkpoint_root

        a, copies = self.assignment, self.experiment.recovery.checkpoint_folder
        if a.workdir is not None:
            with program.os_errors_as_usage("workdir", a.workdir):
                check_folder(a.workdir / "learners" / str(a.learner))
        if not copies and a.workdir is None:
            return None
        folder = checkpoint_root(a.workdir, copies) / "learners" / str(a.learner)
        if not copies:
            return folder
        try:
            if "://" not in copies:
                check_folder(pathlib.Path(folder))
            folder.mkdir(parents=True, exist_ok=True)
        except Exception as error:  # of a bucket, whose libraries raise errors of their own
            raise ConfigError(f"config.recovery.checkpoint_folder: {folder}: {reason(error)}") from None
        return folder

    def _ended(self, preempted: bool) -> int:
        """Of a learner that did not fail; `preempted`: another of its processes had a signal."""
        if self.received:
            return 128 + self.received[0]
        return PREEMPTED if preempted or self.regroups else DONE


def _why_over(workdir: pathlib.Path, steps: int) -> str | None:
    """Why a syncer that an engine starts does not resume the run there; None: it does."""
    from ddiloco.storage import operator_orders
    from ddiloco.storage.durable import FOLDER
    from ddiloco.storage.run_mark import RunMarkError
    from ddiloco.telemetry.run_files import is_over

    if is_over(workdir, steps):
        return f"the run in {workdir} is over"
    with contextlib.suppress(RunMarkError):  # the next start shows it
        if (over := operator_orders.load(workdir / FOLDER).over) is not None:
            remedy = f"--resume goes on with it, or --resume=auto without {FOLDER}/{operator_orders.NAME}"
            return f"the run in {workdir} {over}: {remedy}"
    return None


def _own_port(coordinator: str) -> int:
    """The port at which this host coordinates if it is the first of those that are there."""
    if coordinator:
        return int(check_address(coordinator, "coordinator").rpartition(":")[2])
    from ddiloco.launch.ports import reserved_ports

    with reserved_ports(2, "0.0.0.0") as port:  # free a moment ago; should one be taken, all come again
        return port


def _place(assignment: Assignment, timeout: float) -> HostPlace:
    """Which of the learner's hosts this process is."""
    from ddiloco.remote.learner.hosts import HostPlace

    coordinator = check_address(assignment.coordinator, "coordinator")
    return HostPlace(assignment.process, assignment.processes, coordinator, assignment.refused, timeout)
