"""Brings the hosts of each learner together: the syncer is what all of them reach, whichever is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time

import grpc

from ddiloco.protocol.rendezvous import Dissolve, Form, Rendezvous
from ddiloco.remote.syncer.session import MAX_CALLS
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Call, Refused
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.security import Security, donor_address
from ddiloco.remote.wire.validation import WireError, parse

MAX_TIMEOUT = 3600.0  # seconds


@dataclasses.dataclass
class _Host:
    """A host's connection."""

    coordinator: str  # HOST:PORT at which it coordinates
    messages: asyncio.Queue[pb.HostGroup] = dataclasses.field(default_factory=asyncio.Queue)


@dataclasses.dataclass
class _Learner:
    rules: Rendezvous
    hosts: dict[int, _Host] = dataclasses.field(default_factory=dict)
    again: asyncio.TimerHandle | None = None  # when to decide without an event


class HostRendezvous:
    """Answers the hosts of learners that may shrink; used in the event loop alone."""

    def __init__(self, terms: Terms, security: Security) -> None:
        self._terms, self._security = terms, security
        self._learners: dict[int, _Learner] = {}
        self._over = False

    async def answer(self, first: bytes, call: Call) -> None:
        """Answers a host, as long as its process lives; raises Refused."""
        try:
            present = parse(pb.HostPresent, first)
        except WireError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        learner, host = self._joined(present, call)
        ended, message = asyncio.ensure_future(call.read()), asyncio.ensure_future(host.messages.get())
        try:
            while True:
                await asyncio.wait({ended, message}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return
                group = message.result()
                await call.write(group.SerializeToString())
                message = asyncio.ensure_future(host.messages.get())
        finally:
            ended.cancel()
            message.cancel()
            if learner.hosts.get(present.host) is host:  # else the host's next process has its place
                del learner.hosts[present.host]
                learner.rules.leave(present.host, time.monotonic())
                self._decide(learner)

    def end(self) -> None:
        """Has hosts leave that wait for others: the run is over."""
        self._over = True
        for learner in self._learners.values():
            for number, host in learner.hosts.items():
                if number not in learner.rules.group:
                    host.messages.put_nowait(pb.HostGroup(leave=True))

    def _joined(self, present: pb.HostPresent, call: Call) -> tuple[_Learner, _Host]:
        """The learner, and the host as one of it; raises Refused where it is none."""
        problem = self._misfit(present)
        caller = self._security.caller(call.context).learner
        if problem is None and caller not in (None, present.learner):
            problem = f"these are not the credentials of learner {present.learner}"
        at = donor_address(call.context.peer(), present.port, present.address)
        if problem is not None or at is None:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, problem or "its address is none")
        timeout = min(present.timeout, MAX_TIMEOUT)
        settings = present.hosts, present.min_hosts, timeout
        learner = self._learners.get(present.learner)
        if learner is None or learner.rules.empty:
            try:
                learner = self._learners[present.learner] = _Learner(Rendezvous(*settings))
            except ValueError as error:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"config.remote.{error}") from None
        if settings != (learner.rules.count, learner.rules.min_hosts, learner.rules.timeout):
            differs = f"the hosts of learner {present.learner} differ in --processes or config.remote"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, differs)
        host = _Host(at)
        if self._over and not present.group:
            host.messages.put_nowait(pb.HostGroup(leave=True))
            return _Learner(learner.rules), host
        try:
            learner.rules.join(present.host, time.monotonic(), tuple(present.group))
        except ValueError:
            host.messages.put_nowait(pb.HostGroup(leave=True))  # others have taken the learner's place
            return _Learner(learner.rules), host
        learner.hosts[present.host] = host
        if present.group and learner.rules.dissolving:
            host.messages.put_nowait(pb.HostGroup(leave=True))
        self._decide(learner)
        return learner, host

    def _misfit(self, present: pb.HostPresent) -> str | None:
        """In one line, why it is no host of a learner of this run; None: it is."""
        terms = self._terms
        if present.version != wire.VERSION:
            return f"the syncer speaks version {wire.VERSION} of the wire, the learner {present.version}"
        if present.learner >= terms.max_learners:
            return f"learner {present.learner} is none of the {terms.max_learners} of this run"
        most = MAX_CALLS * terms.room(present.learner)
        if not 0 < present.hosts <= most:
            return (
                f"a learner of {present.hosts} hosts, where the syncer has room for {most}, by remote.hosts"
            )
        if present.host >= present.hosts or not all(host < present.hosts for host in present.group):
            return f"host {present.host} is none of {present.hosts}"
        if not present.timeout > 0:
            return f"config.remote.host_timeout: is {present.timeout:g}"
        return None

    def _decide(self, learner: _Learner) -> None:
        """Carries out what the hosts that are there now lead to; again once the timeout is over."""
        match learner.rules.decide(time.monotonic()):
            case Form(hosts):
                name, first = secrets.token_hex(8), learner.hosts[hosts[0]].coordinator
                group = pb.HostGroup(hosts=hosts, coordinator=first, name=name)
                for host in hosts:
                    learner.hosts[host].messages.put_nowait(group)
            case Dissolve(hosts):
                for host in hosts:
                    if host in learner.hosts:
                        learner.hosts[host].messages.put_nowait(pb.HostGroup(leave=True))
        if learner.again is not None:
            learner.again.cancel()
        if not learner.rules.empty:
            pause = learner.rules.timeout + 0.01  # asyncio's clock may be a tick early
            learner.again = asyncio.get_running_loop().call_later(pause, self._decide, learner)
