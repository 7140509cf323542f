"""Carries out an operator's commands: drain, evict, add or limit learners, set timing, snapshot, stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ddiloco.config import ConfigError
from ddiloco.remote.syncer.session import Session
from ddiloco.remote.wire.calls import Call, Refused
from ddiloco.remote.wire.management import Answer, Command
from ddiloco.remote.wire.security import OPERATOR, Security
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage import operator_orders
from ddiloco.storage.operator_orders import StandingOrders, shown_timing
from ddiloco.storage.run_mark import RunMarkError
from ddiloco.telemetry.records import reason
from ddiloco.workers.exchange import Leave
from ddiloco.workers.retiming import Retiming

_EVICTED = 1000  # orders to drop a learner that are remembered


class Management:
    """Answers commands, and obeys orders given to other shards of the syncer.

    A drained learner is sent the end of the run, at each connection: its process ends with exit code 0. A
    stopped run stays stopped for engines, which restart the syncer.
    """

    def __init__(
        self,
        security: Security,
        max_learners: int,
        step: Callable[[], int] = lambda: 0,
        take_snapshot: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda line: None,
        folder: pathlib.Path | None = None,
        shard: int = 0,
        shards: Callable[[], Sequence[str]] = tuple,
        retiming: Retiming | None = None,
    ) -> None:
        """`log` is called with a line on each command; learner numbers are below `max_learners`.

        `step`: the global one. `take_snapshot`: requests one; False if none are taken at all. `folder`: the
        syncer's, with earlier orders. `shard`: number of this one; the first revokes a stop when it resumes
        the run. `shards`: HOST:PORT of all of them. `retiming` follows the ordered timing, from now on.

        Raises:
          ConfigError: the run cannot have the timing that was ordered.
          RunMarkError: the earlier orders cannot be read.
        """
        self._security, self._max_learners = security, max_learners
        self._step, self._take_snapshot, self._stop, self._log = step, take_snapshot, stop, log
        self._lock = threading.Lock()  # of the orders
        self._keeping = threading.Lock()  # while it is written; draining must not wait for a disk
        self._folder = folder
        self._shards, self._retiming = shards, retiming
        self._sessions: Callable[[], Sequence[Session]] = tuple
        self._end: Callable[[Session, str], None] = lambda session, reason: None
        self._orders = StandingOrders() if folder is None else operator_orders.load(folder)
        if retiming is not None:
            retiming.follow(self._orders)
        if shard and self._orders.stopped:
            stop()
        elif not shard and (kept := self._keep(lambda orders: orders._replace(stopped=False, failure=None))):
            log(f"the stopped run continues{kept}")

    def attach(self, sessions: Callable[[], Sequence[Session]], end: Callable[[Session, str], None]) -> None:
        """`sessions`: those of the learners that are connected; `end` closes one, for a reason."""
        self._sessions, self._end = sessions, end

    def drained(self, learner: int) -> bool:
        """Whether the learner was retired, and has not been added again."""
        with self._lock:
            return learner in self._orders.drained

    async def answer(self, request: bytes, call: Call) -> None:
        """Answers a call."""
        caller = self._security.caller(call.context)
        if caller.learner not in (None, OPERATOR):
            whose = "a learner's credentials are for its own work; take the operator's"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, whose)
        try:
            command = Command.read(request)
        except WireError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        loop = asyncio.get_running_loop()  # orders are written to the disk
        await call.write(bytes(await loop.run_in_executor(None, self.do, command, caller.host)))

    def do(self, command: Command, host: str) -> Answer:
        """Carries out a command of an operator at `host`; returns the answer."""
        answer = self._done(command)
        if command.verb != "status":
            self._log(f"{host} asked to {command.verb}: {answer.line}")
        return answer

    def _done(self, command: Command) -> Answer:
        match command:
            case Command("status"):
                return self._status()
            case Command("stop"):
                kept = self._keep(lambda orders: orders._replace(stopped=True))
                return Answer(True, f"the run ends, with everything saved{kept}")
            case Command("snapshot"):
                done = self._take_snapshot()
                return Answer(done, "a snapshot is taken" if done else f"ask the first shard{self._first()}")
            case Command("drain", int(learner)) if learner < self._max_learners:
                kept = self._keep(lambda orders: orders.drain(learner))
                return Answer(True, f"learner {learner} ends after its step{kept}", {"learner": learner})
            case Command("evict", int(learner)) if learner < self._max_learners:
                return self._evict(learner)
            case Command("set", settings=settings) if settings and self._retiming is not None:
                return self._set(self._retiming, command)
            case Command("set"):
                return Answer(False, "no settings are given, or none can change")
            case Command("limit", learner, settings) if learner is None or learner < self._max_learners:
                return self._limit(learner, settings.get("bytes_per_second"))
            case Command("add", learner) if learner is None or learner < self._max_learners:
                return self._add(learner)
        return Answer(
            False, f"a learner's number is below {self._max_learners}, by config.remote.max_learners"
        )

    def _first(self) -> str:
        address = next(iter(self._shards()), "")
        return f", {address}" if address else ""

    def look(self) -> None:
        """Obeys the present orders, of any shard; reads an invalid file again later."""
        if self._folder is not None and self._keeping.acquire(blocking=False):
            try:
                with contextlib.suppress(RunMarkError, ConfigError):
                    self._obey(operator_orders.load(self._folder))
            finally:
                self._keeping.release()

    def _keep(self, change: Callable[[StandingOrders], StandingOrders]) -> str:
        """Makes new orders durable, and obeys them; returns the error of a disk that refuses."""
        with self._keeping:
            kept = ""
            try:
                orders = change(self._orders)
                orders = orders if self._folder is None else operator_orders.change(self._folder, change)
            except (OSError, RunMarkError) as error:
                kept = f", but a restarted syncer will not know it: {reason(error)}"
            self._obey(orders)
        return kept

    def _obey(self, orders: StandingOrders) -> None:
        with self._lock:
            before, self._orders = self._orders, orders
        if orders.stopped and not before.stopped:
            self._stop()
        if self._retiming is not None:
            self._retiming.follow(orders)
        leaving = set(orders.drained) - set(before.drained)
        dropped = {m for m in orders.evicted if orders.evicted.count(m) > before.evicted.count(m)}
        for session in self._sessions():
            if orders.limits.get(session.learner) != before.limits.get(session.learner):
                self.limit(session)
            if session.learner in leaving:
                session.deliver(Leave())
            if session.learner in dropped:
                self._end(session, "evicted")

    def limit(self, session: Session) -> None:
        """Limits the link of a learner that has connected as was ordered."""
        with self._lock:
            rate = self._orders.limits.get(session.learner)
        session.limit(rate, max(1, len(self._shards())))

    def _limit(self, learner: int | None, rate: float | None) -> Answer:
        """Limits the link of a learner, or of all, to so many bytes a second; None: no longer."""
        if rate is not None and not 0.0 < rate < math.inf:
            return Answer(False, f"a limit is a number of bytes a second above 0, not {rate}")
        named = range(self._max_learners) if learner is None else (learner,)
        kept = self._keep(lambda orders: orders.limit(named, rate))
        whose = "all links are" if learner is None else f"the link of learner {learner} is"
        to = "not limited" if rate is None else f"limited to {8e-6 * rate:g} Mbit/s each way"
        return Answer(True, f"{whose} {to}{kept}")

    def _set(self, retiming: Retiming, command: Command) -> Answer:
        """Changes settings of config.sync for all shards."""
        try:
            retiming.check({**self._orders.timing, **command.settings})
        except ConfigError as error:
            return Answer(False, str(error))
        kept = self._keep(lambda orders: orders.set_timing(command.settings, command.reason))
        return Answer(True, f"from now on {shown_timing(command.settings)}{kept}")

    def _evict(self, learner: int) -> Answer:
        """Drops the connection of a learner that may hang; its next process is a new one."""
        present = [session for session in self._sessions() if session.learner == learner]
        if present:
            self._keep(lambda orders: orders._replace(evicted=(*orders.evicted[-_EVICTED:], learner)))
        told = (
            f"learner {learner} is dropped; it may rejoin" if present else f"learner {learner} is not there"
        )
        return Answer(bool(present), told, {"learner": learner})

    def _add(self, learner: int | None) -> Answer:
        taken = {session.learner for session in self._sessions()}
        free = (m for m in range(self._max_learners) if m not in taken)
        number = learner if learner is not None else next(free, None)
        if number is None:
            most = f"all {self._max_learners} learners of config.remote.max_learners"
            return Answer(False, f"{most} are there")
        kept = self._keep(lambda orders: orders.add(number))
        return Answer(True, f"learner {number} may come{kept}", {"learner": number})

    def _status(self) -> Answer:
        present = sorted(session.learner for session in self._sessions())
        with self._lock:
            drained, timing = sorted(self._orders.drained), self._orders.timing
        facts: dict[str, Any] = {"step": self._step(), "present": present, "drained": drained}
        facts["num_learners"] = self._max_learners
        facts["shards"] = list(self._shards())
        named = ", ".join(map(str, present)) or "none"
        retired = f"; drained: {', '.join(map(str, drained))}" if drained else ""
        timed = f"; {shown_timing(timing)}" if timing else ""
        line = f"step {facts['step']}; learners: {named} of {self._max_learners}{retired}{timed}"
        return Answer(True, line, facts)
