"""A syncer's processes, and learners that play traffic without training: what `bench syncer` measures."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from ddiloco.outer.encoding import wire_format
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.remote.learner.client import ShardBook, SyncerClient, SyncerClients
from ddiloco.remote.learner.streams import HostWire
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.process import run_shard, run_syncer
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.settings.experiment import Experiment, parse
from ddiloco.telemetry import records
from ddiloco.training import platform
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.exchange import EventDelivery, Leave, Pieces
from ddiloco.workers.learner_actor import LearnerActor, LearnerArrays, LearnerDriver
from ddiloco.workers.transfer import Offer
from experiments.bench.measuring import (
    TIMEOUT,
    Seconds,
    another_process,
    processor_seconds,
    receive_from,
    resident_bytes,
)
from experiments.cli import program

TOKENS = 1  # of a step, as learners claim
_TURN_SECONDS = 0.04


@dataclasses.dataclass(frozen=True)
class PlayedTraffic:
    """What is played: every round has all learners, and `overlap` rounds are in flight.

    Attributes:
      shards: S.
      rows: of the matrix of 1,024 columns that a fragment is.
      up, down: the codecs.
      core: to which the syncer's processes are pinned; the others of all have the other cores.
      turns: of the core's time, of which each process has one. 1: all of it.
      steps: a round each, and at the last step one of each other fragment that has work left; those of the
        first cycle of fragments do not count.
    """

    shards: int
    rows: int
    up: str
    down: str
    overlap: int
    steps: int
    core: int
    turns: int = 1
    learners: int = 8
    fragments: int = 24
    preset: str = "streaming"
    hosts: int = 1  # of each learner

    @property
    def fragment_bytes(self) -> int:
        """In float32."""
        return 4 * 1024 * self.rows

    @property
    def durable_bytes(self) -> int:
        """Of a round: the version, its momentum, and what the update codec left out."""
        return (2 if self.down == "f32" else 3) * self.fragment_bytes

    def planned(self, assembly: Assembly, rounds: int) -> tuple[int, int]:
        """Bytes that learners send, and that they receive: an offer and an update a round, and a welcome."""
        offer, update = (
            sum(form.nbytes for form in wire_format(assembly.layout, 0, codec))
            for codec in (self.up, self.down)
        )
        own = self.learners * rounds
        return own * offer, own * update + self.learners * self.fragments * self.fragment_bytes


@dataclasses.dataclass(frozen=True)
class PlayedRun:
    """What was measured after the first cycle.

    Attributes:
      rounds: values of each round's record, in the order of their ends, with its `time`.
      processors: by role ("syncer", "learners") and what they were spent on, seconds.
      sent: by (step, fragment), when the first learner sent its offer; `received`: when the last update came.
      num_rounds: of the whole run, with the last ones of all fragments.
      moved: bytes that learners sent and received, in the whole run; `planned`: what they should be.
      memory: bytes that the syncer's first process had at most, over those that it began with.
    """

    rounds: list[dict[str, Any]]
    processors: dict[str, Seconds]
    sent: dict[tuple[int, int], float]
    received: dict[tuple[int, int], float]
    num_rounds: int
    moved: tuple[int, int]
    planned: tuple[int, int]
    memory: int

    @property
    def rate(self) -> float:
        """Rounds a second."""
        times = [values["time"] for values in self.rounds]
        return (len(times) - 1) / (times[-1] - times[0])


def play(traffic: PlayedTraffic, folder: pathlib.Path) -> PlayedRun:
    """Starts all processes, the syncer's durable state in the folder, and lets them run to the end."""
    with contextlib.ExitStack() as stack:
        main = stack.enter_context(another_process(serve, traffic, folder))
        address = receive_from(main)
        others = range(1, traffic.shards)
        shards = [stack.enter_context(another_process(_shard, traffic, folder, s)) for s in others]
        learners = stack.enter_context(another_process(_learners, traffic, address))
        named = {"syncer": [main, *shards], "learners": [learners]}

        def spent() -> dict[str, Seconds]:
            return {name: _sum(asked(pipe)[1] for pipe in pipes) for name, pipes in named.items()}

        pids = [asked(pipe)[0] for pipe in named["syncer"]]
        assert receive_from(learners) == "warm"
        with _in_turns(pids, traffic.turns):
            since, begun = time.time(), spent()
            assert receive_from(learners) == "over"
            ended = spent()
        sent, received = receive_from(learners)
        ledger = receive_from(main)
    rounds = [values for values in ledger["rounds"] if values["time"] > since]
    between = {n: {k: s - begun[n].get(k, 0.0) for k, s in ended[n].items()} for n in named}
    count = len(ledger["rounds"])
    planned, moved = traffic.planned(assembly_of(traffic), count), (ledger["sent"], ledger["received"])
    return PlayedRun(rounds, between, sent, received, count, moved, planned, ledger["memory"])


def _sum(found: Iterable[Seconds]) -> Seconds:
    return dict(sum(map(collections.Counter, found), collections.Counter()))


def asked(pipe: Connection) -> tuple[int, Seconds]:
    """A process's id, and its processor time."""
    pipe.send("spent?")
    return receive_from(pipe)


@contextlib.contextmanager
def _in_turns(pids: Sequence[int], turns: int) -> Iterator[None]:
    """Lets each of these processes run in one of so many turns, as if each had that share of a core."""
    over = threading.Event()

    def run() -> None:
        for turn in itertools.cycle(range(turns)):
            with contextlib.ExitStack() as stack:
                for pid in pids[turn::turns]:
                    os.kill(pid, signal.SIGCONT)
                    stack.callback(os.kill, pid, signal.SIGSTOP)
                if over.wait(_TURN_SECONDS):
                    return

    if turns == 1:
        yield
        return
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def answer(pipe: Connection) -> threading.Semaphore:
    """Answers what this process has spent, whenever it is asked, on a thread; released after each answer."""
    answered = threading.Semaphore(0)

    def run() -> None:
        with contextlib.suppress(EOFError, OSError):
            while pipe.recv():
                pipe.send((os.getpid(), processor_seconds()))
                answered.release()

    threading.Thread(target=run, name="answer", daemon=True).start()
    return answered


class _Matrices:
    """The part of a `Recipe` that a syncer needs: one matrix a fragment."""

    samples, batches = False, None

    def __init__(self, traffic: PlayedTraffic) -> None:
        self.shapes = {f"layers/{p}/kernel": (traffic.rows, 1024) for p in range(traffic.fragments)}

    def initial_parameters(self) -> dict[str, np.ndarray]:
        return {name: np.broadcast_to(np.float32(1), shape) for name, shape in self.shapes.items()}

    def check_beginning(self) -> None:
        pass


def _experiment(traffic: PlayedTraffic) -> Experiment:
    config = program.load_config(f"configs/dense.py:tiny,paper,{traffic.preset}")
    config.driver, config.tape.enabled, config.eval.every, config.sample.tokens = "remote", False, None, 0
    ahead = traffic.overlap
    config.sync.update(num_learners=traffic.learners, num_fragments=traffic.fragments, overlap=ahead)
    config.sync.interval = traffic.fragments
    if traffic.preset == "streaming":
        config.sync.max_run_ahead = ahead
    config.outer.update(codec=traffic.up, update_codec=traffic.down, optimizer="nesterov")
    config.train.steps = traffic.steps
    config.virtual.num_chips = traffic.learners
    config.remote.update(syncer_shards=traffic.shards, gather=TIMEOUT)
    if traffic.hosts > 1:
        config.remote.hosts = (traffic.hosts,) * traffic.learners
    config.recovery.keep_versions = 1
    return parse(config)


def assembly_of(traffic: PlayedTraffic) -> Assembly:
    """What the syncer's processes and the learners are made of."""
    return Assembly(_experiment(traffic), _Matrices(traffic))


def pin(traffic: PlayedTraffic, merges: bool) -> None:
    """Has this process run on the core of those that merge, or else on the others."""
    others = os.sched_getaffinity(0) - {traffic.core}
    os.sched_setaffinity(0, {traffic.core} if merges or not others else others)


def _prepared(pipe: Connection, traffic: PlayedTraffic) -> tuple[Assembly, Listening]:
    """What each of the syncer's processes begins with."""
    pin(traffic, merges=True)
    platform.prepare(cache=False)
    answer(pipe)
    assembly = assembly_of(traffic)
    e = assembly.experiment
    return assembly, Listening("127.0.0.1:0", Security(), e.remote, e.max_learners)


def serve(pipe: Connection, traffic: PlayedTraffic, folder: pathlib.Path) -> None:
    """The syncer's first process."""
    ledger: dict[str, Any] = {"rounds": [], "sent": 0, "received": 0}

    def record(made: records.Record) -> None:
        match made:
            case records.Transferred(_, sent, received):
                ledger["sent"] += sent
                ledger["received"] += received
            case records.Noted("round", values, at):
                ledger["rounds"].append({**values, "time": at})

    assembly, listening = _prepared(pipe, traffic)
    before = resident_bytes("VmRSS")
    listening.claim()
    pipe.send(listening.address)
    security, stop = Security(), threading.Event()
    run_syncer(assembly, record, stop, listening=listening, security=security, folder=folder)
    pipe.send({**ledger, "memory": resident_bytes("VmHWM") - before})


def _shard(pipe: Connection, traffic: PlayedTraffic, folder: pathlib.Path, shard: int) -> None:
    assembly, listening = _prepared(pipe, traffic)
    where = {"listening": listening, "security": Security(), "folder": folder}
    why = run_shard(assembly, threading.Event(), shard, **where)
    assert why is None, why


def _learners(pipe: Connection, traffic: PlayedTraffic, address: str) -> None:
    """All learners, each on a thread of its own."""
    pin(traffic, merges=False)
    platform.prepare(cache=False)
    answered = answer(pipe)
    assembly, times = assembly_of(traffic), _Times({}, {})
    learners = [_Learner(m, assembly, address, _offered(assembly), times) for m in range(traffic.learners)]
    threads = [threading.Thread(target=learner.run, daemon=True) for learner in learners]
    for thread in threads:
        thread.start()
    learners[0].cycled.wait()
    pipe.send("warm")
    for thread in threads:
        thread.join()
    pipe.send("over")
    for _ in range(2):  # "warm" and "over"
        answered.acquire()
    for learner in learners:
        learner.client.finish(1.0)
    pipe.send(tuple(times))


def _offered(assembly: Assembly) -> tuple[np.ndarray, ...]:
    """A fragment as learners send it: all alike, so that they cost their process nothing."""
    rng = np.random.default_rng(0)

    def array(form: Any) -> np.ndarray:
        if form.dtype == np.float32:
            return rng.uniform(0.5, 1.0, form.shape).astype(np.float32)
        return rng.integers(0, 127, form.shape).astype(form.dtype)

    return tuple(map(array, wire_format(assembly.layout, 0, assembly.experiment.outer.codec_of(0))))


class _Times(NamedTuple):
    """When the first offer went and the last update came, by step and fragment; for several threads."""

    sent: dict[tuple[int, int], float]
    received: dict[tuple[int, int], float]


class _Learner(LearnerDriver):
    """A learner's actor and its client; a step takes no time, and its arrays are always the same."""

    def __init__(
        self, learner: int, assembly: Assembly, address: str, arrays: Sequence[np.ndarray], times: _Times
    ) -> None:
        e = assembly.experiment
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cycled = threading.Event()
        core = LearnerCore(learner, 1, e.sync, e.train.steps, e.syncer_shards)
        self._actor = LearnerActor(core, _SameArrays(Offer(tuple(arrays))), self)
        self._times = times
        decode: Callable[..., Any] | None = lambda p, difference, pieces: pieces  # noqa: E731
        if e.outer.update_codec == "f32":
            decode = None
        terms = terms_of(e, assembly.layout)
        book = ShardBook(address, learner, 1, terms.shards)
        own = HostWire(terms, Security(), e.remote, decode)
        every = [SyncerClient(book, shard, own) for shard in range(book.shards)]
        self.client = SyncerClients(every)
        self.client.attach(self.inbox)

    def run(self) -> None:
        """Steps whenever it may, until it must leave and has the update of every round."""
        core, leaving = self._actor.core, False
        self.client.start()
        self._take(events.Heartbeat())
        while not leaving or sum(core.versions) < core.total_steps:
            idle = not core.recovered or core.blocked or core.done
            try:
                message = self.inbox.get(timeout=core.heartbeat if idle else 0.0)
            except queue.Empty:
                if idle:
                    self._take(events.Heartbeat())
                else:
                    self._step()
                continue
            leaving = leaving or isinstance(message, Leave)
            if isinstance(message, EventDelivery):
                self._take(message.event, message.fragments)

    def _step(self) -> None:
        self._take(events.StepStarted(TOKENS))
        self._take(events.StepFinished())
        core = self._actor.core
        if core.clock > core.policy.num_fragments:
            self.cycled.set()

    def _take(self, event: events.LearnerEvent, fragments: Sequence[Pieces] = ()) -> None:
        if isinstance(event, events.UpdateArrived):
            self._times.received[event.step, event.fragment] = time.time()
        self._actor.handle(event, time.monotonic(), fragments)

    # As the driver of its actor.

    def send(self, event: events.FromLearner, shard: int) -> None:
        self.client.say(event, shard)

    def send_offer(self, offer: events.FragmentArrived, arrays: Offer) -> None:
        self._times.sent.setdefault((offer.round.step, offer.round.fragment), time.time())
        self.client.send(offer.round, offer.contribution, arrays)


class _SameArrays(LearnerArrays):
    """Those of a learner whose offers are all alike."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def offered(self, fragment: int, steps: int) -> Offer:
        return self._offer
