"""A run on a Ray cluster: each role is an actor, placed by its resources and restarted by Ray.

Ray does what supervises: an actor whose process or node dies is started again where there is room, and waits
where there is none, so that learners come as nodes join. The syncer and the evaluator stay on the node from
which the run is started, beside the workdir. Fragments travel over our own wire, never through the object
store; through Ray go settings, credentials and exit codes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import state as cluster_state  # has what has no public name without a dashboard
from ray.util import placement_group, remove_placement_group, tpu
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ddiloco.config import REFUSED
from ddiloco.launch.assignment import (
    EVALUATOR,
    FAILED,
    FINAL,
    LEARNER,
    PREEMPTED,
    SYNCER,
    Assignment,
)
from ddiloco.launch.ports import reserved_ports
from ddiloco.remote.wire.security import Security
from ddiloco.storage import operator_orders
from ddiloco.storage.durable import FOLDER
from ddiloco.telemetry.files import read_json

if TYPE_CHECKING:
    from ddiloco.settings.experiment import Experiment

# Runs one role to its end; returns the exit code.
RoleMain = Callable[[Assignment, "Experiment", Security, threading.Event], int]
Options = Mapping[str, Any]  # of an actor

LATE_SECONDS = 15.0  # for learners to end after their syncer has
POLL = 1.0  # seconds
SETTLED_SECONDS = 600.0  # of a run, after which a refusal is a node's, not one of the settings that all have
PAUSE = 60.0  # seconds until a process is begun again where a node refused it, or could not begin it


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of one process of a learner."""

    cpus: float = 1.0  # cores
    gpus: float = 0.0
    tpus: float = 0.0  # chips
    processes: int = 1  # of a learner, each on a node of its own
    topology: str = ""  # of the TPU slice that is one learner, such as 2x2x4; empty: of none
    version: str = ""  # of the slice, such as v5p
    port: int = 0  # the syncer's, with the next ones for its other shards; 0: any that is free
    coordinators: int = 7100  # ports of learner 0's processes, this and the next; each learner has two more

    @property
    def options(self) -> dict[str, Any]:
        """The same as an actor's options."""
        chips = {"TPU": self.tpus} if self.tpus else {}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": chips}


class RoleActor:
    """One process of a run, in an actor."""

    def __init__(self, main: RoleMain, experiment: Experiment, security: Security) -> None:
        self._main, self._experiment, self._security = main, experiment, security
        self._stop, self._leaving = threading.Event(), False

    def run(self, assignment: Assignment, first: Any = None) -> int:
        """Runs the role; returns an exit code that is final, and ends the process after any other.

        Ray starts another process then, and calls this again. `first`: the actor of the learner's process 0,
        which gives the address; the assignment has only the port.
        """
        host = ray.util.get_node_ip_address()
        if assignment.processes > 1:
            leader = host if first is None else ray.get(first.where.remote())[1]
            assignment = dataclasses.replace(assignment, coordinator=f"{leader}:{assignment.coordinator}")
        print(f"{assignment.name} begins on {host}, process {os.getpid()}", flush=True)
        try:
            code = self._main(assignment, self._experiment, self._security, self._stop)
        except Exception:  # it must not be the run's: another process may do better
            traceback.print_exc()
            code = FAILED
        if self._leaving or code not in FINAL:
            code = PREEMPTED if self._leaving else code
            print(f"{assignment.name} ends with exit code {code}", flush=True)
            sys.stderr.flush()
            os._exit(code)
        return code

    def where(self) -> tuple[str, str, int]:
        """The node's id and address, and the process's id on it."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def leave(self) -> None:
        """Saves all and ends this process; Ray starts another, on a node that stays."""
        self._leaving = True
        self._stop.set()

    def end(self) -> None:
        """Saves all and ends the role."""
        self._stop.set()


class RayRun:
    """The actors of one run; Ray must have been initialised."""

    def __init__(
        self,
        experiment: Experiment,
        workdir: pathlib.Path,
        resources: Resources,
        main: RoleMain,
        note: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        kept: pathlib.Path | None = None,
    ) -> None:
        """`note` takes a line on each end; `environment`: variables of every process.

        `kept`: a learner's folder for its tape and copies; `workdir` itself, if all nodes share it.
        """
        self._experiment, self._workdir, self._resources = experiment, workdir.resolve(), resources
        self._main, self._note, self._environment = main, note, dict(environment or {})
        self._kept = None if kept is None else kept.resolve()
        self._running: dict[Any, str] = {}  # actor's name by the future of its exit code
        self._begun: dict[str, tuple[Assignment, Security, Options]] = {}  # by actor, its arguments
        self._groups: list[Any] = []
        self._left: set[tuple[str, str]] = set()  # learner, and the node that it was asked to leave
        # Rounds merged, and how often each actor was begun before the last of them
        self._seen: tuple[int, collections.Counter[str]] | None = None
        self.actors: dict[str, Any] = {}

    def run(self, stop: threading.Event) -> int:
        """Runs all roles until the syncer has ended, as `stop` asks it to; returns the run's exit code."""
        host, port = ray.util.get_node_ip_address(), self._resources.port
        with contextlib.ExitStack() as stack:
            port = port or stack.enter_context(reserved_ports(self._experiment.syncer_shards, host))
            stack.callback(self._close)
            self._start_all(host, port)
            return self._wait(stop)

    def _start_all(self, host: str, port: int) -> None:
        address = f"{host}:{port}"
        e, places = self._experiment, [self._places(m) for m in range(self._experiment.max_learners)]
        remote = dataclasses.replace(e.remote, hosts=tuple(map(len, places)), spares=0)
        e = self._experiment = dataclasses.replace(e, remote=remote)
        security = Security(tokens={m: secrets.token_hex(24) for m in range(len(places))})
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        beside = {"num_cpus": 0, "scheduling_strategy": this_node}
        syncer = Assignment(SYNCER, syncer=address, workdir=self._workdir, resume=None)
        for shard in range(e.syncer_shards):
            one = dataclasses.replace(syncer, shard=shard, syncer=f"{host}:{port + shard}")
            self._start(one, security, beside)
        if e.eval.every is not None:
            self._start(Assignment(EVALUATOR, workdir=self._workdir), Security(), beside)
        for m, own in enumerate(places):
            one = Assignment(LEARNER, m, processes=len(own), syncer=address, workdir=self._kept)
            one = dataclasses.replace(one, coordinator=str(self._resources.coordinators + 2 * m))
            for process, place in enumerate(own):
                self._start(dataclasses.replace(one, process=process), security.of(m), place)

    def _places(self, learner: int) -> list[dict[str, Any]]:
        """The options of the actors of a learner's processes."""
        needs, name = self._resources, f"learner {learner}"
        if needs.topology:
            group = tpu.slice_placement_group(needs.topology, needs.version, name=name)
            self._groups.append(group)
            placed, each = group.placement_group, {"num_cpus": 0, "resources": group.bundle_resources}
            count = group.num_bundles
        elif needs.processes > 1:
            bundle = {"CPU": needs.cpus, "GPU": needs.gpus, "TPU": needs.tpus}
            bundles = [{kind: count for kind, count in bundle.items() if count}] * needs.processes
            placed, each, count = placement_group(bundles, "STRICT_SPREAD", name), needs.options, len(bundles)
            self._groups.append(placed)
        else:
            return [needs.options]
        strategies = (PlacementGroupSchedulingStrategy(placed, index) for index in range(count))
        return [{**each, "scheduling_strategy": strategy} for strategy in strategies]

    def _start(self, assignment: Assignment, security: Security, options: Options) -> None:
        name = assignment.name
        self._begun[name] = assignment, security, options
        platform = {} if assignment.role == LEARNER else {"JAX_PLATFORMS": "cpu"}
        options = {**options, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 4}
        variables = {**self._environment, **platform}
        environment = {"env_vars": variables} if variables else None  # a process that Ray has ready will do
        kind = ray.remote(RoleActor).options(name=name, runtime_env=environment, **options)
        actor = self.actors[name] = kind.remote(self._main, self._experiment, security)
        first = self.actors[dataclasses.replace(assignment, process=0).name] if assignment.process else None
        self._running[actor.run.remote(assignment, first)] = name

    def _wait(self, stop: threading.Event) -> int:
        settled_at = time.monotonic() + SETTLED_SECONDS
        due_at: dict[str, float] = {}  # of those that a node has refused, or could not begin
        while True:
            if stop.is_set():  # sent each time: another process may be the syncer by now
                self.actors[SYNCER].end.remote()
            for name, code in self._ended(POLL):
                refused = code == REFUSED and name != EVALUATOR
                if refused and time.monotonic() < settled_at:
                    return code
                again = refused or code == FAILED
                if name == SYNCER and (stop.is_set() or not again or self._has_failed()):
                    while self._running and self._ended(LATE_SECONDS):
                        pass
                    return PREEMPTED if stop.is_set() and not code else code
                if again:
                    due_at[name] = time.monotonic() + PAUSE
            for name in [name for name, at in due_at.items() if at <= time.monotonic()]:
                ray.kill(self.actors[name])
                with contextlib.suppress(ValueError):  # the dead actor may still have the name
                    self._start(*self._begun[name])
                    del due_at[name]
            if (failing := self._failing({*self._running.values(), *due_at})) is not None:
                self._note(f"{failing} fails again and again, and nothing is merged meanwhile")
                return FAILED
            self._leave_draining_nodes()

    def _has_failed(self) -> bool:
        """Whether the run failed for good, so that the syncer must not be restarted."""
        return operator_orders.has_failed(self._workdir / FOLDER)

    def _ended(self, seconds: float) -> list[tuple[str, int]]:
        """The actor that has ended, and its exit code; waits so long at most."""
        done, _ = ray.wait(list(self._running), timeout=seconds)
        names = [self._running.pop(code) for code in done]
        return [(name, self._code(name, code)) for name, code in zip(names, done, strict=True)]

    def _code(self, name: str, ended: Any) -> int:
        try:
            code: int = ray.get(ended)
        except ray.exceptions.RayError as error:  # its node cannot even unpack it
            first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
            self._note(f"{name} cannot begin: {first_line}")
            return FAILED
        self._note(f"{name} has ended with exit code {code}")
        return code

    def _failing(self, names: Collection[str]) -> str | None:
        """Names the syncer or all learners, if restarted too often since the run last merged; else None."""
        begun = collections.Counter[str]()  # those that took the place of one that was refused have its name
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        for actor in cluster_state.actor_table(None, job).values():
            begun[actor["Name"]] += 1 + actor["NumRestarts"]
        rounds = read_json(self._workdir / "summary.json").get("rounds") or 0
        if self._seen is None or rounds != self._seen[0]:
            self._seen = rounds, begun
        again, most = begun - self._seen[1], self._experiment.remote.restarts
        if any(again[name] > most for name in names if name.startswith(SYNCER)):
            return "the syncer"
        learners = [again[name] > most for name in names if name.startswith(LEARNER)]
        return "every learner" if learners and all(learners) else None

    def _leave_draining_nodes(self) -> None:
        """Makes learners leave draining nodes while their work can still be merged."""
        draining = cluster_state.get_draining_nodes()
        if not draining:
            return
        asked = {self.actors[name].where.remote(): name for name in self._running.values()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL)
        for answer in answered:
            name = asked[answer]
            with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted
                node, *_ = ray.get(answer)
                if name.startswith(LEARNER) and node in draining and (name, node) not in self._left:
                    self._left.add((name, node))
                    self._note(f"{name} leaves its node, which drains")
                    self.actors[name].leave.remote()

    def _close(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)
        for group in self._groups:
            group.shutdown() if hasattr(group, "shutdown") else remove_placement_group(group)
