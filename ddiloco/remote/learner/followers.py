"""Host 0's side of a learner of several hosts: its orders, and the other hosts' messages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import grpc

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.security import Gate, Security, donor_address
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.workers.exchange import EventDelivery

NOTED_EVERY = 600.0  # seconds between lines on hosts that do not come

Broke = Callable[[Exception], None]
Key = tuple[int, int, int, int]
"""Welcome, fragment, version and lineage of what is delivered, as in a Here; of a welcome as a whole, its
incarnation and shard."""


def key_of(told: EventDelivery) -> Key:
    """The name of a welcome or an update that all hosts get."""
    match told.event:
        case events.Welcomed(incarnation=incarnation, shard=shard):
            return incarnation, shard, 0, 0
        case events.UpdateArrived(fragment=fragment, version=version, lineage=lineage):
            return 0, fragment, version, lineage
    raise ValueError(f"{type(told.event).__name__} brings no fragments")


def here_message(key: Key) -> pb.Here:
    """The key as a message between hosts."""
    return pb.Here(**dict(zip(("welcome", "fragment", "version", "lineage"), key, strict=True)))


def key_in(here: pb.Here) -> Key:
    """The key that such a message has."""
    return here.welcome, here.fragment, here.version, here.lineage


def forget_older(known: MutableMapping[Key, Any], key: Key) -> None:
    """Drops the key's fragment or shard of welcomes up to its own, or of updates up to its version."""
    welcome, fragment, version, _ = key
    for w, p, v, lineage in list(known):
        if p == fragment and (w <= welcome if w else not welcome and v <= version):
            del known[w, p, v, lineage]


class Followers:
    """Hosts 1 and up, in the process of host 0. For any thread."""

    def __init__(
        self,
        count: int,
        learner: int,
        terms: Terms,
        security: Security,
        timeout: float,
        lost: Callable[[str], None],
        leaving: Callable[[], None],
    ) -> None:
        """Not listening yet.

        Args:
          count: of followers.
          learner: the learner's number.
          terms: which they must share.
          security: the credentials that they need.
          timeout: seconds without a message of a follower, after which it is lost.
          lost: called with a line when a follower is lost, for any reason.
          leaving: called when one was asked to end.
        """
        self.count = count
        self.told: Callable[[pb.FromHost], None] = lambda message: None  # of what is not handled here
        self.deliver: Callable[[EventDelivery], None] = lambda told: None
        self._learner, self._terms, self._lost, self._leaving = learner, terms, lost, leaving
        self._change = threading.Condition(threading.RLock())
        self._orders: dict[int, queue.SimpleQueue[pb.Order | None]] = {}  # by host
        self._copies: dict[int, set[int]] = {}  # by host: numbers of the copies on its disk
        self._donors: dict[int, str] = {}  # by host: HOST:PORT, of those that give
        self._done: dict[int, list[pb.FromHost.Done]] = {}  # results by copy
        self._here: dict[Key, set[int]] = {}  # hosts that have a delivery
        self._own: dict[Key, EventDelivery] = {}  # deliveries that this host has, and not all others
        self._drawn: dict[int, list[pb.Drawn]] = {}  # by number of the batch
        self._numbers = itertools.count(1)
        self._streams: dict[int, tuple[int, Broke]] = {}  # by shard: their number, and the callback
        self._over = False
        self._security, self._timeout = security, timeout
        gate = Gate(security.admits, "the learner's host 0 asks for another token")
        self._server = wire.server(timeout / 2, 2 * count + 4, interceptors=[gate])

    def start(self, address: str) -> None:
        """Listens at HOST:PORT; raises ConfigError if that is not available."""
        self._security.listen(self._server, address)
        wire.serve(self._server, wire.FOLLOW, {"Follow": grpc.stream_stream_rpc_method_handler(self._follow)})

    def gather(self, stop: threading.Event, note: Callable[[str], None]) -> bool:
        """Waits until all have connected; False if `stop` is set first.

        There is no timeout: a host that compiles, or prepares data, would start over forever. `note` is
        called with a line on the missing hosts.
        """
        noted_at = time.monotonic() + NOTED_EVERY
        with self._change:
            while len(self._orders) < self.count:
                if stop.is_set():
                    return False
                if time.monotonic() > noted_at:
                    absent = ", ".join(str(n) for n in range(1, self.count + 1) if n not in self._orders)
                    note(f"waits for its hosts to be ready: {absent} of {self.count + 1}")
                    noted_at += NOTED_EVERY
                self._change.wait(0.2)
        return True

    def stop(self) -> None:
        """Ends the streams, after all orders."""
        with self._change:
            self._over = True
            for orders in self._orders.values():
                orders.put(None)
        self._server.stop(grace=5.0).wait(6.0)

    def order(self, order: pb.Order) -> None:
        """Sends an order to all hosts, in sequence."""
        with self._change:
            for orders in self._orders.values():
                orders.put(order)

    def connect(self, streams: pb.Order.Streams, broke: Broke) -> None:
        """Orders the other hosts to exchange their blocks with a shard of the syncer, in a session.

        `streams` gets its number. `broke` is called if such a stream ends, unless others have replaced it.
        """
        with self._change:
            streams.number = next(self._numbers)
            self._streams[streams.shard] = streams.number, broke
            self.order(pb.Order(streams=streams))

    def send(self, round_id: RoundId, contribution: Contribution) -> None:
        """Orders the other hosts to send their blocks of an offer."""
        fields = dataclasses.asdict(round_id), dataclasses.asdict(contribution)
        self.order(pb.Order(send=pb.Order.Send(round=fields[0], contribution=fields[1])))

    def own(self, told: EventDelivery) -> None:
        """Delivers what this host has got, once all others have their blocks of it."""
        with self._change:
            self._own[key_of(told)] = told
        self._deliver_complete(key_of(told))

    def forget(self, told: EventDelivery) -> None:
        """Orders the other hosts to drop their blocks of an update that will not be applied."""
        self.order(pb.Order(forget=here_message(key_of(told))))

    def drawn(self, number: int) -> list[pb.Drawn]:
        """The other hosts' parts of the batch with this number; waits for them."""
        with self._change:
            while len(self._drawn.get(number, ())) < self.count and not self._over:
                self._change.wait()
            return self._drawn.pop(number, [])

    def donors(self) -> list[str]:
        """HOST:PORT of all others, where these give a peer its blocks."""
        with self._change:
            return [self._donors[host] for host in sorted(self._donors)]

    @contextlib.contextmanager
    def doing(self, copy: int, order: pb.Order) -> Iterator[None]:
        """Orders an operation on a copy from the other hosts; `done` waits for it within the `with` block."""
        with self._change:
            self._done[copy] = []
        try:
            self.order(order)
            yield
        finally:
            with self._change:
                del self._done[copy]

    def done(self, copy: int, until: float) -> list[pb.FromHost.Done]:
        """All other hosts' results, `until` by time.monotonic; raises WireError if one is missing."""
        with self._change:
            said = self._done[copy]
            self._change.wait_for(
                lambda: len(said) == self.count or any(one.problem for one in said) or self._over,
                max(0.0, until - time.monotonic()),
            )
        late = "" if len(said) == self.count else "it takes too long"
        if problem := next((one.problem for one in said if one.problem), late):
            raise WireError("not all hosts", problem)
        return said

    def copies(self) -> set[int]:
        """The numbers of the copies of the inner state that all others have on disk."""
        with self._change:
            return set.intersection(*self._copies.values())

    # Each call runs in a thread of gRPC's.

    def _follow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if self._security.caller(context).learner not in (None, self._learner):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "these are another learner's credentials")
        with wire.ended_after(self._timeout, context.cancel):
            first = next(requests, b"")
        try:
            following = parse(pb.FromHost, first).following
            self._check(following)
        except WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        host, orders = following.host, queue.SimpleQueue[pb.Order | None]()
        with self._change:
            if host in self._orders:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"there is a host {host} already")
            self._copies[host] = set(following.copies)
            donor = donor_address(context.peer(), following.donor_port, following.donor_host)
            if donor is not None:
                self._donors[host] = donor
            self._orders[host] = orders
            self._change.notify_all()
        context.add_callback(lambda: self._gone(host))
        threading.Thread(target=self._hear, args=(host, requests), name=f"host-{host}", daemon=True).start()
        while (order := orders.get()) is not None:
            yield order.SerializeToString()

    def _check(self, following: pb.FromHost.Following) -> None:
        if not 0 < following.host <= self.count:
            raise WireError("no such host", f"{following.host} of {self.count + 1}")
        differs = self._terms.misfit(following.fingerprint, following.rules)
        if following.learner != self._learner:
            differs = f"it is of learner {following.learner}, not {self._learner}"
        if differs is not None:
            raise WireError("another learner's host", differs)

    def _gone(self, host: int) -> None:
        if not self._over:
            self._lost(f"host {host} of the learner is gone")

    def _hear(self, host: int, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                self._take(host, parse(pb.FromHost, data))
        except Exception as error:  # gRPC raises bare Exceptions where a stream breaks
            if not self._over:
                self._lost(f"host {host} of the learner is gone: {f'{error} '.splitlines()[0]}")

    def _take(self, host: int, message: pb.FromHost) -> None:
        match message.WhichOneof("kind"):
            case "here":
                key = key_in(message.here)
                with self._change:
                    self._here.setdefault(key, set()).add(host)
                self._deliver_complete(key)
            case "drawn":
                with self._change:
                    self._drawn.setdefault(message.drawn.number, []).append(message.drawn)
                    self._change.notify_all()
            case "broken":
                with self._change:
                    present = [broke for number, broke in self._streams.values() if number == message.broken]
                for broke in present:
                    broke(WireError("another host's connection ended"))
            case "leaving":
                self._leaving()
            case "kept":
                with self._change:
                    self._copies[host].add(message.kept)
            case "done":
                with self._change:
                    self._done.get(message.done.copy, []).append(message.done)
                    self._change.notify_all()
            case _:
                self.told(message)

    def _deliver_complete(self, key: Key) -> None:
        """Delivers updates that all hosts have, and drops older ones."""
        with self._change:
            if key not in self._own or len(self._here.get(key, ())) < self.count:
                return
            told = self._own.pop(key)
            forget_older(self._here, key)
            forget_older(self._own, key)
        self.deliver(told)
