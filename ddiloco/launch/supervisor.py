"""Starts the roles of a run as processes of this machine, restarts those that die, and leaves none behind."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ddiloco.config import REFUSED, ConfigError
from ddiloco.launch import processes
from ddiloco.launch.assignment import ASKED, PREFIX, SIGNALLED
from ddiloco.launch.ports import reserved_port, reserved_ports
from ddiloco.settings.experiment import Experiment, task_of
from ddiloco.settings.loop import LoopConfig
from ddiloco.settings.remote import RemoteConfig, backoff
from ddiloco.storage import operator_orders, run_mark
from ddiloco.storage.durable import FOLDER
from ddiloco.storage.workdir import check_free
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.records import reason
from ddiloco.telemetry.waits import waiting

POLL = 0.1  # seconds
LEAVE_SECONDS = 90.0  # for a syncer to end the run once its last learner has ended
LATE_SECONDS = 15.0  # for learners to end after their syncer has
SPARE_SECONDS = 2.0  # from a spare's use until another spare is started
STEADY_SECONDS = 60.0  # of uptime, after which earlier failures are forgotten if the run has progressed
TOGETHER_SECONDS = 5.0  # for the processes of a learner to end once one of them has
LOST = 255  # exit code of a process whose end was missed, since the fork server was killed
CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # by the number of a process's TPU chips

_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

# Called at each start of a process with its role, its number and None, and at its end, before a restart, with
# its exit code (minus the signal that killed it); in the supervisor's thread.
Observe = Callable[[str, int, int | None], None]


@dataclasses.dataclass
class Role:
    """One process to be kept running: a module, its arguments, and those added after the first start."""

    name: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    again: Sequence[str] = ()
    alone: Sequence[str] = ()  # added where all learners have left after their last step
    process: BaseProcess | None = None
    stdin: Connection | None = None  # of a spare: the writing end
    failures: int = 0  # in a row
    seen: object = None  # the run's progress when earlier failures were last forgotten
    started_at: float = 0.0
    ended_at: float = 0.0  # of the last process whose end was passed to `observe`
    due_at: float | None = None  # when to start it; None: it runs, or will not be started again
    assignment: str = ""  # line on a spare's standard input that gives it the role; empty: none may take it
    observed: bool = True  # whether its end, if any, was passed to `observe`
    begun: Callable[[], bool] = lambda: True  # whether its first start went so far that `again` applies
    hosts: int = 1  # number of its processes, which live and die as one; `process` is the first
    others: list[BaseProcess] = dataclasses.field(default_factory=list)  # those after the first

    @property
    def over(self) -> bool:
        """Whether it does not run and will not be started."""
        return self.due_at is None and (self.process is None or self.process.exitcode is not None)


@dataclasses.dataclass
class Roles:
    """All processes of a run."""

    syncer: Role
    learners: Sequence[Role]
    shards: Sequence[Role] = ()  # the syncer's other processes, started once the first has begun the run
    spares: Sequence[Role] = ()  # each waits to take the place of a learner that dies
    evaluator: Role | None = None  # the run does not depend on it

    @property
    def needed(self) -> list[Role]:
        """The started roles that the run cannot do without."""
        started = [role for role in self.shards if role.process is not None]
        return [self.syncer, *started, *self.learners]

    @property
    def beside(self) -> list[Role]:
        """The roles that the run can continue without."""
        return [*self.spares, *([] if self.evaluator is None else [self.evaluator])]


class Supervisor:
    """Runs a syncer and its learners; they end with this process, however it was killed."""

    def __init__(
        self,
        roles: Roles,
        config: RemoteConfig,
        note: Callable[[str], None],
        workdir: pathlib.Path,
        observe: Observe = lambda name, pid, code: None,
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        """`note` is called with a line on each death; learners have `late_seconds` to end after the syncer.

        `workdir`: the run's. Its files show progress, after which earlier failures do not count, and whether
        the run has failed for good, so that the syncer is not restarted.
        """
        self._roles, self._config, self._note, self._workdir = roles, config, note, workdir
        self._late_seconds, self._observe = late_seconds, observe

    def run(self, stop: threading.Event) -> int:
        """Runs until the syncer's process has ended, as `stop` asks it to; returns the run's exit code."""
        try:
            return self._run(stop)
        finally:
            self._end_all()

    def _run(self, stop: threading.Event) -> int:
        for role in (self._roles.syncer, *self._roles.learners, *self._roles.beside):
            self._start(role)
        while not stop.wait(POLL):
            if all(role.process is None for role in self._roles.shards) and self._roles.syncer.begun():
                for role in self._roles.shards:
                    self._start(role)
            if self._run_is_over():
                break
            for role in self._roles.needed:
                self._note_end(role)
                self._look_after(role)
            for role in self._roles.beside:
                self._look_after(role)
            if any(map(_refused, self._roles.learners)):
                return REFUSED
            if self._is_deserted():
                self._note("every learner has died or left, and none is restarted any more")
                self._stop_syncer()
                return 1
            if self._given_up(self._roles.syncer):
                return max(1, self._roles.syncer.process.exitcode)
            if any(self._given_up(r) or _refused(r) for r in self._roles.shards):
                self._note("a shard of the syncer cannot be started any more")
                self._stop_syncer()
                return 1
        else:
            self._stop_syncer()
        self._wait_for_learners()
        code = self._roles.syncer.process.exitcode
        if code in (-signal.SIGTERM, -signal.SIGHUP):  # it was not yet handling the signal
            return SIGNALLED - code
        return code if code is not None and code >= 0 else 1  # killed, or too slow to leave

    def _run_is_over(self) -> bool:
        """Whether the syncer has ended regularly, or as it would again; else it is restarted."""
        code = self._roles.syncer.process.exitcode
        if code is None or self._roles.syncer.due_at is not None:
            return False
        if code in (0, REFUSED, *ASKED):
            return True
        by_itself = 0 < code < LOST
        return by_itself and (self._is_trained() or operator_orders.has_failed(self._workdir / FOLDER))

    def _rounds(self) -> int:
        """Merges so far, by the summary."""
        rounds: int = read_json(self._workdir / "summary.json").get("rounds") or 0
        return rounds

    def _given_up(self, role: Role) -> bool:
        """Whether it has failed too often; False until its last death is counted."""
        return role.over and role.failures > self._config.restarts

    def _last_learner(self) -> Role | None:
        """The learner that ended last; None while one runs, or will be started."""
        for role in self._roles.learners:
            self._note_end(role)
        if all(r.over and (r.process.exitcode == 0 or self._given_up(r)) for r in self._roles.learners):
            return max(self._roles.learners, key=lambda r: r.ended_at)
        return None

    def _is_trained(self) -> bool:
        """Whether learners have left after their last step; those given up before do not count."""
        last = self._last_learner()
        return last is not None and last.process.exitcode == 0

    def _is_deserted(self) -> bool:
        """Whether no learner is left to end the run; unsure at first, since one may fail as it leaves."""
        last = self._last_learner()
        if last is None or last.process.exitcode == 0:
            return False
        everyone = all(map(self._given_up, self._roles.learners))
        return everyone or time.monotonic() > last.ended_at + LEAVE_SECONDS

    def _look_after(self, role: Role) -> None:
        now = time.monotonic()
        if role.due_at is not None:
            if now >= role.due_at:
                try:
                    self._start(role)
                except (OSError, EOFError) as error:  # such as too many processes: others continue
                    role.due_at = now + self._config.longest_backoff
                    self._note(f"{role.name} cannot be started now: {reason(error)}")
            return
        self._end_together(role)
        code = role.process.exitcode
        if code in (None, 0) or _refused(role) or role.failures > self._config.restarts:
            return
        if now - role.started_at > STEADY_SECONDS and role.seen != (seen := self._rounds()):
            role.failures, role.seen = 0, seen
        role.failures += 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if role.failures > self._config.restarts:
            self._note(f"the process of {role.name} {how} and is given up")
            return
        ready = [s for s in self._roles.spares if s.process is not None and s.process.exitcode is None]
        if ready and role.assignment:
            self._put_in(ready[0], role)
            self._note(f"the process of {role.name} {how}; a spare takes its place")
            return
        wait = backoff(role.failures, self._config.longest_backoff)
        role.due_at = now + wait
        self._note(f"the process of {role.name} {how}; another is started in {wait:g} s")

    def _end_together(self, role: Role) -> None:
        """Ends all processes of a role once one of them has ended otherwise than it should."""
        codes = [process.exitcode for process in (role.process, *role.others)]
        if any(codes):  # the others have a moment to end by themselves and report why
            for process in (role.process, *role.others):
                process.join(TOGETHER_SECONDS)
                if process.exitcode is None:
                    process.kill()
                    process.join()

    def _put_in(self, spare: Role, role: Role) -> None:
        """Gives the spare's process to the role; a new spare is started a little later."""
        self._note_end(role)
        role.process, spare.process = spare.process, None
        role.process.name = role.name
        role.started_at, role.observed, spare.observed = time.monotonic(), False, True
        spare.due_at = time.monotonic() + SPARE_SECONDS
        self._observe(role.name, role.process.pid, None)
        # If it has just died, the next poll detects that.
        with contextlib.suppress(OSError), spare.stdin:
            os.write(spare.stdin.fileno(), f"{role.assignment}\n".encode())

    def _start(self, role: Role) -> None:
        self._note_end(role)
        again = role.again if role.process is not None and role.begun() else ()
        if all(r.process is not None for r in self._roles.learners) and self._is_trained():
            again = (*again, *role.alone)
        arguments = [*role.arguments, *again]
        role.started_at, role.due_at = time.monotonic(), None
        if role in self._roles.spares:  # without a role yet
            reading, role.stdin = multiprocessing.Pipe(duplex=False)
            with reading:
                role.process = processes.start(role.module, arguments, role.environment, stdin=reading)
        else:
            role.process, *role.others = [
                processes.start(role.module, [*arguments, *own], environment)
                for own, environment in _of_each_host(role)
            ]
            if role is not self._roles.evaluator:
                role.observed = False
                self._observe(role.name, role.process.pid, None)
        for process in (role.process, *role.others):
            process.name = role.name  # by which a notebook finds it among `multiprocessing.active_children()`

    def _note_end(self, role: Role) -> None:
        if not role.observed and role.process.exitcode is not None:
            role.observed, role.ended_at = True, time.monotonic()
            self._observe(role.name, role.process.pid, role.process.exitcode)

    def _stop_syncer(self) -> None:
        """Has the syncer, or a new one if it is dead, end the run for the learners and save everything.

        How long this takes depends on the size of the model; a second signal ends this process at once.
        """
        dead = self._roles.syncer.process.exitcode is not None and not self._run_is_over()
        if dead and self._roles.syncer.begun():
            self._start(self._roles.syncer)
        process = self._roles.syncer.process
        if process.exitcode is None:
            process.terminate()
            with waiting("the syncer to save and leave"):
                process.join()

    def _wait_for_learners(self) -> None:
        deadline = time.monotonic() + self._late_seconds
        for role in (*self._roles.learners, *self._roles.shards):
            with waiting(f"{role.name} to leave"):
                for process in filter(None, (role.process, *role.others)):
                    process.join(max(0.0, deadline - time.monotonic()))

    def _end_all(self) -> None:
        for role in (*self._roles.needed, *self._roles.beside):
            for process in (role.process, *role.others):
                if process is not None and process.exitcode is None:
                    process.kill()
                    process.join()
            self._note_end(role)


def _refused(role: Role) -> bool:
    """Whether it was refused, as it would be again; refusing a later start is a failure (RESTARTED)."""
    return role.over and any(p is not None and p.exitcode == REFUSED for p in (role.process, *role.others))


def _of_each_host(role: Role) -> list[tuple[list[str], Mapping[str, str]]]:
    """Further arguments and environment of each of a role's processes."""
    if role.hosts == 1:
        return [([], role.environment)]
    with reserved_ports(2) as port:  # free a moment ago; should one be taken, all are started again
        job = [f"--processes={role.hosts}", f"--coordinator=127.0.0.1:{port}"]
    return [
        ([*job, f"--process={host}"], host_environment(host, role.hosts, role.environment))
        for host in range(role.hosts)
    ]


def _roles_of_hosts(learner: Role) -> list[Role]:
    """A role for each host of a learner that may go on without some: the syncer brings them together."""
    return [
        dataclasses.replace(
            learner,
            name=f"{learner.name}.{host}" if host else learner.name,
            arguments=[*learner.arguments, f"--processes={learner.hosts}", f"--process={host}"],
            environment=host_environment(host, learner.hosts, learner.environment),
            hosts=1,
            assignment="",
            others=[],
        )
        for host in range(learner.hosts)
    ]


def host_environment(host: int, hosts: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of one of a learner's hosts, in which it sees its share of the learner's GPUs."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not (each := len(gpus) // hosts):
        return environment
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus[host * each : (host + 1) * each])}


def learner_environment(
    learner: int, num_learners: int, environment: Mapping[str, str], hosts: int = 1
) -> dict[str, str]:
    """The environment of one learner's process, in which it sees its share of the devices.

    Divided evenly are simulated CPU devices, at least one each; the GPUs that CUDA_VISIBLE_DEVICES lists,
    which learners share in turn if there are fewer GPUs; and the chips of TPU_VISIBLE_CHIPS. Without these
    all processes see the same devices. On CPU devices a learner computes in as many threads as its share of
    this process's cores. The learner's `hosts` share its simulated devices.
    """
    given = processes.share_of_threads(environment, num_learners * hosts)
    flags = given.get("XLA_FLAGS", "")
    count = _DEVICE_COUNT.search(flags)
    if count is not None:
        share = max(1, int(count.group(1)) // num_learners // hosts)
        flag = f"--xla_force_host_platform_device_count={share}"
        given["XLA_FLAGS"] = _DEVICE_COUNT.sub(flag, flags)
    gpus = [gpu for gpu in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if gpus:
        each = max(1, len(gpus) // num_learners)
        own = [gpus[(learner * each + i) % len(gpus)] for i in range(each)]
        given["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return given | share_of_chips(learner, num_learners, environment)


def evaluator_environment(num_learners: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the evaluator's process: the GPUs that learners leave, else one CPU device."""
    gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    left = gpus[max(1, len(gpus) // num_learners) * num_learners :]
    return (
        {**environment, "CUDA_VISIBLE_DEVICES": ",".join(left)} if left else syncer_environment(environment)
    )


def syncer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the syncer's process, which computes on one CPU device."""
    flags = _DEVICE_COUNT.sub("", environment.get("XLA_FLAGS", ""))
    return {**environment, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def share_of_chips(learner: int, num_learners: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a learner sees its share of the chips in TPU_VISIBLE_CHIPS; empty if not set.

    Raises:
      ConfigError: there are fewer chips than learners; a chip belongs to one process.
    """
    chips = [chip for chip in environment.get("TPU_VISIBLE_CHIPS", "").split(",") if chip]
    if not chips or num_learners == 1:
        return {}
    if len(chips) < num_learners:
        raise ConfigError(f"TPU_VISIBLE_CHIPS: lists {len(chips)} chips for {num_learners} learners")
    each = max(size for size in CHIP_BOUNDS if size <= len(chips) // num_learners)
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips[learner * each : (learner + 1) * each]),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": CHIP_BOUNDS[each],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a process of four chips is taken to own all
    }


RESTARTED = ["--restarts=1"]  # refusals of a process that was started before may be temporary


def _begun(workdir: pathlib.Path, resume: bool) -> Callable[[], bool]:
    """A function: whether a run has begun in the workdir; with `resume` at any time, else since this call."""

    def found() -> run_mark.RunMark | None:
        with contextlib.suppress(run_mark.RunMarkError):  # the syncer will say why
            return run_mark.begun(workdir / FOLDER)
        return None

    before = None if resume else found()
    return lambda: found() not in (None, before)


def _with_tokens(environment: Mapping[str, str], learners: int) -> dict[str, str]:
    """The environment with a token for each learner, not in a file, which would have to outlast the run."""
    tokens = "".join(f"{m} {secrets.token_hex(24)}\n" for m in range(learners))
    kept = {name: value for name, value in environment.items() if name != f"{PREFIX}TOKEN_FILE"}
    return {**kept, f"{PREFIX}TOKEN": tokens}


def _shards(
    count: int, shared: Sequence[str], environment: Mapping[str, str], held: contextlib.ExitStack
) -> list[Role]:
    """The roles of a syncer's shards beside the first, each with a port that is `held` for it."""
    return [
        Role(
            f"shard {shard} of the syncer",
            "experiments.syncer",
            [*shared, f"--shard={shard}", f"--listen=127.0.0.1:{held.enter_context(reserved_port())}"],
            syncer_environment(environment),
            RESTARTED,
        )
        for shard in range(1, count)
    ]


@dataclasses.dataclass(frozen=True)
class FailureStudy:
    """Hooks of a study of failures into a run's processes.

    Attributes:
      observe: as in `Supervisor`.
      route: (learner, the syncer's HOST:PORT) -> the HOST:PORT that the learner connects to.
      played: by learner, the module that runs instead of experiments.learner; no spare replaces it.
    """

    observe: Observe = lambda name, pid, code: None
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
    """Runs all roles on the loopback, each learner with a token of its own; returns the exit code.

    Args:
      config: the same settings as program arguments, `--config=FILE` first.
      note: called with a line on what happens to the processes.
      profile: FIRST:LAST steps that learner 0 profiles.
      study: hooks of a study of failures.
      resume: whether to resume the run in the workdir.

    Raises:
      ConfigError: another run has the workdir.
    """
    check_free(workdir)
    count, played = experiment.max_learners, study.played
    processes.warm_up()
    with contextlib.ExitStack() as held:
        port = held.enter_context(reserved_port())
        address = f"127.0.0.1:{port}"
        environment = _with_tokens(os.environ, count)
        shared = [*config, f"--workdir={workdir}"]
        syncer = Role(
            "the syncer",
            "experiments.syncer",
            [*shared, f"--listen={address}", *(["--resume"] if resume else [])],
            syncer_environment(environment),
            again=["--resume", *RESTARTED],
            begun=_begun(workdir, resume),
            alone=["--finish"],
        )
        shards = _shards(experiment.syncer_shards, shared, environment, held)
        loop = isinstance(experiment.model, LoopConfig)
        scored = experiment.eval.every is not None or not (loop or not task_of(experiment).samples)
        profiled = [] if profile is None else [f"--profile={profile}"]
        learners = []
        for m in range(count):
            route, hosts = study.route(m, address), experiment.hosts(m)
            learner = Role(
                f"learner {m}",
                played.get(m, "experiments.learner"),
                [*shared, f"--syncer={route}", f"--learner_id={m}", *(profiled if m == 0 else [])],
                learner_environment(m, count, environment, hosts=hosts),
                again=[] if m in played else RESTARTED,
                assignment="" if m in played else f"{m} {route}",
                hosts=hosts,
            )
            together = experiment.remote.min_hosts is None or hosts == 1
            learners += [learner] if together else _roles_of_hosts(learner)
        evaluator = Role(
            "the evaluator",
            "experiments.evaluator",
            [*config, f"--workdir={workdir}"],
            evaluator_environment(count, os.environ),
            RESTARTED,
        )
        spares = [
            Role(
                f"spare {n}",
                "experiments.learner",
                [*shared, "--spare", *RESTARTED],  # it stands in for one
                learner_environment(0, count, environment),
            )
            for n in range(experiment.remote.spares)
        ]
        roles = Roles(syncer, learners, shards, spares, evaluator if scored else None)
        watched = Supervisor(roles, experiment.remote, note, workdir, study.observe)
        return watched.run(stop)
