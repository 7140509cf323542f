"""Admission of connections: which process may act as which learner."""

from __future__ import annotations

import hmac
from typing import NamedTuple

import grpc

from ddiloco.remote.syncer.session import MAX_CALLS, Session
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.security import OPERATOR, Caller

FURTHEST = 1 << 52
"""The largest number of a process or an incarnation that nothing led to: as microseconds, the year 2112."""

LEAP = 1 << 20
"""How far an incarnation may be above the newest known one: a process takes one each time it rejoins."""

MAX_REPLACED = 64  # replaced processes of one learner that are remembered


class Refusal(NamedTuple):
    """A refused hello: the status of the call, the line for the learner, and the counter.

    `alarm`: the line for the operator; None for a mere mistake.
    """

    code: grpc.StatusCode
    sentence: str
    reason: str = "join refused"
    alarm: str | None = None


class Admission:
    """Judges hellos. Used under one lock, so that no two processes are let in for one learner."""

    def __init__(self, terms: Terms, run: str, shard: int = 0) -> None:
        """`run`: the syncer's; `shard`: which of its processes this is."""
        self._terms, self._run, self._shard = terms, run, shard
        self._places: dict[int, list[int]] = {}  # by learner: processes that held its number, in order

    def refusal(
        self, hello: pb.Hello, caller: Caller, present: Session | None, newest: int, now: float
    ) -> Refusal | None:
        """The refusal of a process; None: it is accepted.

        Args:
          hello: its message.
          caller: by its credentials.
          present: the learner's open session, if there is one.
          newest: the learner's newest incarnation, 0 if none is known.
          now: monotonic seconds.
        """
        misfit = self._misfit(hello)
        if misfit is not None:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, misfit)
        if caller.learner is not None and caller.learner != hello.learner:
            owner = "the operator" if caller.learner == OPERATOR else f"learner {caller.learner}"
            whose = f"the credentials of {owner}"
            return Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"these are {whose}, not of learner {hello.learner}",
                "another learner's number",
                f"a process of {caller.host} with {whose} asked for the place of learner {hello.learner}",
            )
        if hello.process > max(FURTHEST, newest + LEAP):
            beyond = "process number out of range"
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, beyond, beyond, f"{caller.host}: {beyond}")
        return None if present is None else self._of_a_second(hello, caller, present, now)

    def admitted(self, learner: int, process: int) -> None:
        """The process has the learner's place, perhaps again; all others that have had it are replaced."""
        others = [other for other in self._places.get(learner, ()) if other != process]
        self._places[learner] = [*others[-MAX_REPLACED:], process]

    def _of_a_second(self, hello: pb.Hello, caller: Caller, present: Session, now: float) -> Refusal | None:
        """Why the learner's present connection is not given up for this one; None: it is."""
        if hmac.compare_digest(hello.session.encode(), present.name.encode()):
            return None  # the same process, which has lost its connection
        if hello.process in self._places.get(hello.learner, ())[:-1]:
            return Refusal(wire.REPLACED, f"another process of learner {hello.learner} has taken its place")
        if caller.learner is not None and hello.process > present.process:
            return None  # the owner of the number has started another process
        if now >= present.heard_at + self._terms.silence_timeout:
            return None
        told = f"learner {hello.learner} is connected from {present.caller.host}, and speaks"
        return Refusal(
            grpc.StatusCode.UNAVAILABLE,
            f"{told}; another process may take its place once it is silent",
            "number taken",
            f"a second process, of {caller.host}, asked for the place of learner {hello.learner}: refused",
        )

    def _misfit(self, hello: pb.Hello) -> str | None:
        """In one line, why the learner does not fit this run."""
        terms = self._terms
        if hello.version != wire.VERSION:
            return f"the syncer speaks version {wire.VERSION} of the wire, the learner {hello.version}"
        differs = terms.misfit(hello.fingerprint, hello.rules)
        if differs is not None:
            return differs
        if (shards := max(1, hello.shards)) != terms.shards:
            return f"config.remote.syncer_shards: the syncer has {terms.shards}, the learner {shards}"
        if hello.shard != self._shard:
            return f"this is shard {self._shard} of the syncer, and the learner looks for shard {hello.shard}"
        if hello.learner >= terms.max_learners:
            return f"learner {hello.learner} is none of the {terms.max_learners} of this run"
        most = MAX_CALLS * terms.room(hello.learner)
        if hello.hosts > most:
            return f"a learner of {hello.hosts} hosts, where the syncer has room for {most}, by remote.hosts"
        if hello.run and hello.run != self._run:
            return f"the learner is of run {hello.run[:8]}, the syncer of run {self._run[:8]}"
        return None
