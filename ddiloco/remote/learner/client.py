"""A learner's end of the wire: keeps connecting to a shard of the syncer, and never delays steps."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from ddiloco.protocol import events
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, RoundId, Watermark
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.outbox import Outbox
from ddiloco.remote.learner.streams import Collector, HostWire, Streams
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import MAX_REASON_LENGTH, syncer_event
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.schema import codec
from ddiloco.settings.remote import HANDSHAKE, backoff
from ddiloco.telemetry.throughput import Throughput
from ddiloco.workers.exchange import CheckpointAsked, CheckpointWritten, Delivery, EventDelivery, Leave
from ddiloco.workers.inbox import Inbox
from ddiloco.workers.transfer import Offer

NOTED_AFTER = 7  # failed tries, about 15 seconds: a learner may be started before its syncer


class _AnotherRun(Exception):
    """The syncer's run is not the one that the learner is of."""


class ShardBook:
    """Where the shards of the syncer are, and who a learner is to all of them; for any thread.

    Attributes:
      learner: its number.
      process: unix microseconds of the process's start.
      shards: S.
    """

    def __init__(self, address: str, learner: int, process: int, shards: int = 1) -> None:
        """`address`: HOST:PORT of the first shard, from which the others' addresses come."""
        self.learner, self.process, self.shards = learner, process, shards
        self._addresses = [address, *[""] * (shards - 1)]
        self._run = ""
        self._lock = threading.Lock()

    @property
    def run(self) -> str:
        """The run that has let the learner in, hex; empty: none has."""
        return self._run

    def belongs_to(self, run: str) -> str:
        """The run that the learner is of: this one if no shard has let it in before."""
        with self._lock:
            self._run = self._run or run
            return self._run

    def at(self, addresses: Sequence[str]) -> None:
        """Sets the addresses of all shards; empty: not known yet. The first keeps its given address."""
        for shard, address in enumerate(addresses[: self.shards]):
            if shard and address:
                self._addresses[shard] = address

    def address(self, shard: int) -> str:
        """HOST:PORT of the shard; raises ConnectionError if it is not known."""
        if not self._addresses[shard]:
            raise ConnectionError("it has not been there yet")
        return self._addresses[shard]

    def name(self, shard: int) -> str:
        """The shard's name in messages."""
        which = f"shard {shard} of the syncer" if self.shards > 1 else "the syncer"
        return f"{which} at {self._addresses[shard]}" if self._addresses[shard] else which


class SyncerClient:
    """Connects to one shard, again after each disconnect, until `finish` or a refusal.

    Without a connection steps continue, and messages to the shard wait in the outbox. An invalid message of
    the shard ends the connection, and is counted in `malformed`.
    """

    def __init__(
        self,
        book: ShardBook,
        shard: int,
        own: HostWire,
        note: Callable[[str], None] = lambda line: None,
        gives_at: tuple[str, int] = ("", 0),
        accepted: Callable[[pb.Accepted], None] = lambda accepted: None,
        followers: Followers | None = None,
    ) -> None:
        """`book`: addresses of all shards; `shard`: which of them.

        `note` is called with a line on a lost connection. `gives_at`: host and port at which peers may
        request the inner state, as of `Donor.open`. `accepted` is called for each connection. `followers`:
        the other hosts of the learner; None: there are none.
        """
        self.outbox = Outbox(book.learner)
        self.shard, self.book = shard, book
        self.accepted = threading.Event()  # the shard has let the learner in, or refused it
        self.newest_incarnation = 0  # of this learner, as far as the shard knew
        self.furthest: Watermark = NOTHING_MERGED  # of its work as it joined, that the shard has
        self.versions: tuple[int, ...] = ()  # by fragment, the newest then
        self.peers_token = ""  # that learners show to each other
        self.refusal: str | None = None  # one line: why the syncer will never let it in
        self.connections = self.malformed = 0
        self.throughput = Throughput()  # of welcomes
        self._own, self._followers, self._note = own, followers, note
        self._gives_at, self._accepted = gives_at, accepted
        self._session = ""  # name of the last connection
        self._connection: _Connection | None = None
        self._inbox: Inbox | None = None
        self.over = False  # the shard has sent that the run is over
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._control: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"wire-{book.learner}-{shard}", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def attach(self, inbox: Inbox) -> None:
        """Puts what arrives into the inbox of the learner's worker from now on."""
        with self._lock:
            self._inbox = inbox
            if self.over:
                inbox.put(Leave())

    @property
    def run(self) -> str:
        """The run that has let it in, hex."""
        return self.book.run

    @property
    def waiting(self) -> int:
        """The number of offers that no stream has taken yet."""
        connection = self._connection
        return 0 if connection is None else connection.waiting

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; never waits. Without a connection it is dropped: the syncer will ask again."""
        if self._followers is not None:
            self._followers.send(round_id, contribution)
        connection = self._connection
        if connection is not None:
            connection.send(round_id, contribution, offer)

    def send_checkpoint_written(self, written: CheckpointWritten) -> None:
        """Sends the outcome of a snapshot's checkpoint, after the records of its steps; never waits."""
        problem = written.problem[:MAX_REASON_LENGTH]
        message = pb.CheckpointWritten(snapshot=written.number, versions=written.versions, problem=problem)
        self.outbox.say_after_records(pb.FromLearner(checkpoint_written=message))

    def peers(self, timeout: float) -> pb.Peers:
        """Learners that may have an inner state to give; none while there is no connection."""
        connection = self._connection
        return connection.peers(timeout) if connection is not None else pb.Peers()

    def finish(self, timeout: float) -> bool:
        """Sends the rest and a goodbye, if there is a connection; returns whether all was sent.

        Waits up to `timeout` seconds for records to be sent and read; not at all after a refusal.
        """
        deadline = time.monotonic() + (timeout if self.refusal is None else 0.0)
        sent = self.outbox.finish(deadline - time.monotonic())
        self.outbox.say(pb.FromLearner(goodbye=True))
        self._closing.set()
        # The syncer ends the call after the goodbye.
        if self._thread.ident is not None:
            self._thread.join(max(1.0, deadline - time.monotonic()))
        with self._lock:
            if self._control is not None:
                self._control.cancel()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        return sent

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            before = self.connections
            try:
                self._connect()
                reason = "the syncer ended the connection"
            except WireError as error:
                self.malformed += 1
                reason = f"malformed: {error}"
            except _AnotherRun as error:
                self._refused(str(error))
                return
            except ConnectionError as error:
                reason = str(error)
            except grpc.RpcError as error:
                if wire.permanent(error.code()):
                    self._refused(wire.cause(error))
                    return
                reason = wire.cause(error)
            except Exception as error:  # whatever it is, the learner must connect again
                reason = f"{type(error).__name__}: {error}"
            finally:
                self.outbox.disconnected()
            if self._closing.is_set():
                return
            connected = self.connections > before
            if connected:
                self.put(EventDelivery(events.Disconnected(self.shard)))
            failures = 1 if connected else failures + 1
            if (connected or failures == NOTED_AFTER) and not self.over:
                self._note(f"no connection to {self.book.name(self.shard)}: {reason}; trying on")
            self._closing.wait(backoff(failures, self._own.config.longest_backoff))

    def _deliver(self, told: EventDelivery) -> None:
        """Passes on fragments, once all hosts have theirs."""
        if self._followers is None:
            self.put(told)
        else:
            self._followers.own(told)

    def put(self, delivery: Delivery) -> None:
        """Passes a delivery to the worker, once there is one."""
        replaced = None if self._inbox is None else self._inbox.put(delivery)
        if replaced is not None and self._followers is not None:
            self._followers.forget(replaced)

    def _limited(self, rate: float) -> None:
        """Limits what the learner sends to so many bytes a second, divided among its hosts; 0: no longer."""
        if not 0.0 <= rate < math.inf:
            raise WireError("no rate", f"{rate}")
        own = rate if self._followers is None else rate / (self._followers.count + 1)
        self._own.limit.set_rate(own or None)
        if self._followers is not None:
            self._followers.order(pb.Order(limit=own))

    def _refused(self, why: str) -> None:
        self.refusal = why
        self.accepted.set()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self.over = True
            if self._inbox is not None:
                self._inbox.put(Leave())

    def _connect(self) -> None:
        """Runs one connection from its hello to its end.

        Raises:
          grpc.RpcError: it could not be made, or broke.
          LookupError: the shard's address is unknown.
          WireError: a message from the shard cannot be read.
        """
        with contextlib.ExitStack() as stack:
            address = self.book.address(self.shard)
            number = self.outbox.connected()
            hello = pb.Hello(
                version=wire.VERSION,
                fingerprint=self._own.terms.fingerprint,
                rules=self._own.terms.rules,
                learner=self.book.learner,
                process=self.book.process,
                donor_host=self._gives_at[0],
                donor_port=self._gives_at[1],
                run=self.book.run,
                session=self._session,
                hosts=1 if self._followers is None else self._followers.count + 1,
                shard=self.shard,
                shards=self.book.shards,
            )
            channel = stack.enter_context(self._own.channel(address))
            control = channel.stream_stream(wire.CONTROL)(
                self._say(hello, number), metadata=self._own.security.metadata
            )
            with self._lock:
                self._control = control
            try:
                with wire.ended_after(HANDSHAKE, control.cancel):
                    first = parse(pb.ToLearner, next(control, b""))
                if first.WhichOneof("kind") != "accepted":
                    raise WireError("unexpected message", "a connection begins by being accepted")
                if (known := self.book.belongs_to(first.accepted.run)) != first.accepted.run:
                    raise _AnotherRun(f"its run is {first.accepted.run[:8]}, the learner's {known[:8]}")
                self._connection = _Connection(self, channel, control, first.accepted, address)
                self._connection.serve()
            finally:
                self._connection = None
                control.cancel()

    def _say(self, hello: pb.Hello, number: int) -> Iterator[bytes]:
        yield pb.FromLearner(hello=hello).SerializeToString()
        yield from self.outbox.messages(number)


class _Connection:
    """One accepted connection: control, and the streams of its host."""

    def __init__(
        self,
        client: SyncerClient,
        channel: grpc.Channel,
        control: grpc.Call,
        accepted: pb.Accepted,
        address: str,
    ) -> None:
        self._client, self._channel, self._control = client, channel, control
        own = client._own
        self._metadata = (*own.security.metadata, (wire.SESSION_KEY, accepted.session))
        self._cause: Exception | None = None  # why the updates ended, if they ended first
        client.newest_incarnation = max(client.newest_incarnation, accepted.newest_incarnation)
        client.connections += 1
        client._session = accepted.session
        client.peers_token = accepted.peers_token
        client._accepted(accepted)
        if own.receipts is not None:
            own.receipts.connected(client.shard, accepted.run)
        if client.connections == 1:
            client.furthest = codec.read(accepted.furthest)
            client.versions = tuple(accepted.versions)
        elsewhere = accepted.fragments_at if own.config.interface else ""
        if client._followers is not None:  # the other hosts make theirs, too
            named = {"session": client._session, "peers_token": client.peers_token}
            named["address"] = elsewhere or (address if client.shard else "")
            client._followers.connect(pb.Order.Streams(shard=client.shard, **named), self.broke)
        more = [own.channel(elsewhere or address) for _ in range(own.config.connections - (not elsewhere))]
        channels = more if elsewhere else [channel, *more]
        collector = Collector(own.terms.fragments(client.shard), client._deliver, client.shard)
        told = client.outbox.send, self.broke, client.throughput
        self._streams = Streams(own, channels, accepted.session, collector, *told)
        client.outbox.accepted()
        client.accepted.set()

    @property
    def waiting(self) -> int:
        """The number of offers that no stream has taken yet."""
        return self._streams.waiting

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; never waits."""
        self._streams.send(round_id, contribution, offer)

    def serve(self) -> None:
        """Runs until the connection ends."""
        self._streams.start()
        try:
            for data in self._control:
                self._take(parse(pb.ToLearner, data))
        except grpc.RpcError:
            if self._cause is not None:
                raise self._cause from None
            raise
        finally:
            self._control.cancel()
            self._streams.close()

    def broke(self, error: Exception) -> None:
        """Ends it: without updates the connection is of no use."""
        self._cause = self._cause or error
        self._control.cancel()

    def peers(self, timeout: float) -> pb.Peers:
        """As SyncerClient's."""
        ask = self._channel.unary_unary(wire.PEERS)
        try:
            return parse(pb.Peers, ask(b"", metadata=self._metadata, timeout=timeout))
        except (grpc.RpcError, WireError, ValueError):  # the last: the channel is closed
            return pb.Peers()

    def _take(self, message: pb.ToLearner) -> None:
        client = self._client
        match message.WhichOneof("kind"):
            case "leave":
                client._leave()
            case "shards_at":
                client.book.at(message.shards_at.addresses)
            case "limit":
                client._limited(message.limit)
            case "checkpoint_asked":
                client.put(CheckpointAsked(message.checkpoint_asked))
            case _:
                client.put(EventDelivery(syncer_event(message)))


class SyncerClients:
    """A learner's connections to all shards of its syncer; requests without a shard go to the first.

    Attributes:
      all: the client of each shard.
      first: that of the first one.
    """

    def __init__(self, clients: Sequence[SyncerClient]) -> None:
        self.all, self.first = tuple(clients), clients[0]

    def start(self) -> None:
        """Begins to connect."""
        for client in self.all:
            client.start()

    @property
    def answered(self) -> bool:
        """Whether every shard has accepted the learner, or one has refused it or ended the run."""
        return all(client.accepted.is_set() for client in self.all) or self.over or self.refusal is not None

    @property
    def refusal(self) -> str | None:
        """In one line, why a shard will never let it in."""
        return next((client.refusal for client in self.all if client.refusal is not None), None)

    @property
    def over(self) -> bool:
        """Whether a shard has sent that the run is over."""
        return any(client.over for client in self.all)

    @property
    def newest_incarnation(self) -> int:
        """The largest incarnation of this learner known to any shard."""
        return max(client.newest_incarnation for client in self.all)

    @property
    def furthest(self) -> list[Watermark]:
        """By shard, the furthest of the learner's work that it had."""
        return [client.furthest for client in self.all]

    @property
    def versions(self) -> list[int]:
        """By fragment, the newest."""
        by_shard = [client.versions for client in self.all]
        return [by_shard[p % len(by_shard)][p] for p in range(len(by_shard[0]))]

    def attach(self, inbox: Inbox) -> None:
        """Puts what arrives into the inbox of the learner's worker from now on."""
        for client in self.all:
            client.attach(inbox)

    def say(self, event: events.FromLearner | events.OfferFailed, shard: int) -> None:
        """Sends an event to a shard; never waits."""
        self.all[shard].outbox.send(event)

    @property
    def waiting(self) -> int:
        """The number of offers that no stream has taken yet."""
        return sum(client.waiting for client in self.all)

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer to the shard that has the fragment; never waits."""
        self.all[round_id.fragment % len(self.all)].send(round_id, contribution, offer)

    def put(self, delivery: Delivery) -> None:
        """Passes a delivery to the worker, once there is one."""
        self.first.put(delivery)

    def finish(self, timeout: float) -> bool:
        """Sends the rest, records for up to `timeout` seconds, and a goodbye; whether all was sent."""
        sent = self.first.finish(timeout)
        return all([sent, *(client.finish(0.0) for client in self.all[1:])])
