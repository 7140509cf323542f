"""A learner's end of the wire: keeps connecting to the syncer, and never delays steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from ddiloco.outer.encoding import FragmentDecoder
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.outbox import Outbox
from ddiloco.remote.learner.part_connections import PartConnections
from ddiloco.remote.learner.streams import Collector, Host, Streams
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.event_messages import LONGEST_REASON, syncer_event
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.schema import codec
from ddiloco.settings.remote import HANDSHAKE, RemoteConfig, backoff
from ddiloco.telemetry.throughput import Pace
from ddiloco.workers.exchange import CheckpointAsked, CheckpointWritten, Delivery, EventDelivery, Leave
from ddiloco.workers.inbox import Inbox
from ddiloco.workers.transfer import Offer

NOTED_AFTER = 7  # failed tries, about 15 seconds: a learner may be started before its syncer


class _AnotherRun(Exception):
    """The syncer's run is not the one that the learner is of."""


class SyncerClient:
    """Connects, again whenever the connection breaks, until `finish` or a refusal.

    Without a connection steps go on, and messages to the syncer wait in the outbox. A message from the syncer
    that cannot be read ends the connection, and is counted in `malformed`.
    """

    def __init__(
        self,
        address: str,
        learner: int,
        process: int,
        terms: Terms,
        security: Security,
        config: RemoteConfig,
        note: Callable[[str], None] = lambda line: None,
        donor_port: int = 0,
        accepted: Callable[[pb.Accepted], None] = lambda accepted: None,
        decode: FragmentDecoder | None = None,
        followers: Followers | None = None,
        host: Host | None = None,
    ) -> None:
        """`process`: unix microseconds of the process's start. `note` takes a line on a lost connection.

        `donor_port`: where peers may ask for the inner state; 0: nowhere. `accepted` is called each time.
        `decode`: of updates that come as differences; None: none do. `followers`: the other hosts of the
        learner, of which this is `host`; both None: it is a single one.
        """
        self.outbox = Outbox(learner)
        self.accepted = threading.Event()  # a syncer has let the learner in, or refused it
        self.newest_incarnation = 0  # of this learner, as far as the syncer knew
        self.furthest: Watermark | None = None  # of its work as it joined; None: that is not known
        self.versions: tuple[int, ...] = ()  # by fragment, the newest then
        self.run = ""  # the run that has let it in, hex
        self.peers_token = ""  # that learners show to each other
        self.refusal: str | None = None  # one line: why the syncer will never let it in
        self.connections = self.malformed = 0
        self.pace = Pace()  # of welcomes
        self._address, self._learner, self._process = address, learner, process
        self._terms, self._security, self._config, self._note = terms, security, config, note
        self._decode, self._followers, self._host = decode, followers, host
        self._options = wire.options(config.keepalive)
        self._donor_port, self._accepted = donor_port, accepted
        self._session = ""  # name of the last connection
        self._connection: _Connection | None = None
        self._inbox: Inbox | None = None
        self._over = False  # the syncer has said that the run is over
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._control: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"wire-{learner}", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def attach(self, inbox: Inbox) -> None:
        """Puts what arrives into the inbox of the learner's worker from now on."""
        with self._lock:
            self._inbox = inbox
            if self._over:
                inbox.put(Leave())

    @property
    def waiting(self) -> int:
        """How many offers no stream has taken yet."""
        connection = self._connection
        return 0 if connection is None else connection.waiting

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer; never waits. Without a connection it is dropped: the syncer will ask again."""
        if self._followers is not None:
            self._followers.send(round_id, contribution)
        connection = self._connection
        if connection is not None:
            connection.send(round_id, contribution, offer)

    def tell_of_checkpoint(self, written: CheckpointWritten) -> None:
        """Says what became of a snapshot's checkpoint, after the records of its steps; never waits."""
        problem = written.problem[:LONGEST_REASON]
        message = pb.CheckpointWritten(snapshot=written.number, versions=written.versions, problem=problem)
        self.outbox.say_after_records(pb.FromLearner(checkpoint_written=message))

    def peers(self, timeout: float) -> pb.Peers:
        """Learners that may have an inner state to give; none while there is no connection."""
        connection = self._connection
        return connection.peers(timeout) if connection is not None else pb.Peers()

    def finish(self, timeout: float) -> bool:
        """Sends what is left and a goodbye, if there is a connection; returns whether all was sent.

        Waits up to `timeout` seconds for records to be sent and read; not at all after a refusal.
        """
        deadline = time.monotonic() + (timeout if self.refusal is None else 0.0)
        sent = self.outbox.finish(deadline - time.monotonic())
        self.outbox.say(pb.FromLearner(goodbye=True))
        self._closing.set()
        # The syncer ends the call once it has heard the goodbye.
        self._thread.join(max(1.0, deadline - time.monotonic()))
        with self._lock:
            if self._control is not None:
                self._control.cancel()
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
            except grpc.RpcError as error:
                if wire.permanent(error.code()):
                    self._refused(error.details() or error.code().name)
                    return
                reason = error.details() or error.code().name
            except Exception as error:  # whatever it is, the learner must connect again
                reason = f"{type(error).__name__}: {error}"
            finally:
                self.outbox.disconnected()
            if self._closing.is_set():
                return
            connected = self.connections > before
            failures = 1 if connected else failures + 1
            if (connected or failures == NOTED_AFTER) and not self._over:
                self._note(f"no connection to the syncer at {self._address}: {reason}; trying on")
            self._closing.wait(backoff(failures, self._config.longest_backoff))

    def _deliver(self, told: EventDelivery) -> None:
        """Passes on fragments, once all hosts have theirs."""
        if self._followers is None:
            self.put(told)
        else:
            self._followers.own(told)

    def put(self, delivery: Delivery) -> None:
        """Hands something to the worker, once there is one."""
        replaced = None if self._inbox is None else self._inbox.put(delivery)
        if replaced is not None and self._followers is not None:
            self._followers.forget(replaced)

    def _refused(self, why: str) -> None:
        self.refusal = why
        self.accepted.set()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._over = True
            if self._inbox is not None:
                self._inbox.put(Leave())

    def _connect(self) -> None:
        """Runs one connection from its hello to its end.

        Raises:
          grpc.RpcError: it could not be made, or broke.
          WireError: a message from the syncer cannot be read.
        """
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(self._security.channel(self._address, self._options))
                for _ in range(self._config.connections)
            ]
            number = self.outbox.connected()
            hello = pb.Hello(
                version=wire.VERSION,
                fingerprint=self._terms.fingerprint,
                rules=self._terms.rules,
                learner=self._learner,
                process=self._process,
                donor_port=self._donor_port,
                run=self.run,
                session=self._session,
                hosts=1 if self._followers is None else self._followers.count + 1,
            )
            control = channels[0].stream_stream(wire.CONTROL)(
                self._say(hello, number), metadata=self._security.metadata
            )
            with self._lock:
                self._control = control
            try:
                with wire.ended_after(HANDSHAKE, control.cancel):
                    first = parse(pb.ToLearner, next(control, b""))
                if first.WhichOneof("kind") != "accepted":
                    raise WireError("unexpected message", "a connection begins by being accepted")
                if self.run and first.accepted.run != self.run:
                    raise _AnotherRun(f"its run is {first.accepted.run[:8]}, the learner's {self.run[:8]}")
                self._connection = _Connection(self, channels, control, first.accepted)
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
        self, client: SyncerClient, channels: list[grpc.Channel], control: grpc.Call, accepted: pb.Accepted
    ) -> None:
        self._client, self._channels, self._control = client, channels, control
        self._metadata = (*client._security.metadata, (wire.SESSION_KEY, accepted.session))
        self._collector = Collector(client._terms.num_fragments, client._deliver)
        self._parts: PartConnections | None = None
        self._streams: Streams | None = None
        if accepted.parts:
            self._parts = PartConnections(
                self._metadata, client._security, client._config, self._make_streams, self._take, self.broke
            )
        self._cause: Exception | None = None  # why the updates ended, if they ended first
        client.newest_incarnation = max(client.newest_incarnation, accepted.newest_incarnation)
        client.connections += 1
        client.run, client._session = accepted.run, accepted.session
        client.peers_token = accepted.peers_token
        client._accepted(accepted)
        if client.connections == 1:
            client.furthest = None if accepted.parts else codec.read(accepted.furthest)
            client.versions = tuple(accepted.versions)
        if self._parts is None:
            self._streams = self._make_streams(channels, self._metadata, self.broke, pb.Order.Streams())
        client.outbox.accepted()
        client.accepted.set()

    def _make_streams(
        self,
        channels: list[grpc.Channel],
        metadata: Sequence[tuple[str, str]],
        broke: Callable[[Exception], None],
        place: pb.Order.Streams,
    ) -> Streams:
        """With the syncer, or with the one of its parts that `place` names; other hosts make theirs, too."""
        client = self._client
        if client._followers is not None:
            place.session, place.peers_token = client._session, client.peers_token
            client._followers.connect(place, broke)
        return Streams(
            channels,
            metadata,
            client._terms,
            client._decode,
            client.outbox.send,
            broke,
            client.pace,
            client._host,
            self._collector,
        )

    @property
    def waiting(self) -> int:
        """How many offers no stream has taken yet."""
        to = self._streams or self._parts
        return 0 if to is None else to.waiting

    def send(self, round_id: RoundId, contribution: Contribution, offer: Offer) -> None:
        """Sends an offer to who merges the fragment; never waits."""
        if self._streams is not None:
            self._streams.send(round_id, contribution, offer)
        elif self._parts is not None:
            self._parts.send(round_id, contribution, offer)

    def serve(self) -> None:
        """Runs until the connection ends."""
        if self._streams is not None:
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
            if self._streams is not None:
                self._streams.close()
            if self._parts is not None:
                self._parts.close()

    def broke(self, error: Exception) -> None:
        """Ends it: without updates the connection is of no use."""
        self._cause = self._cause or error
        self._control.cancel()

    def peers(self, timeout: float) -> pb.Peers:
        """As SyncerClient's."""
        ask = self._channels[0].unary_unary(wire.PEERS)
        try:
            return parse(pb.Peers, ask(b"", metadata=self._metadata, timeout=timeout))
        except (grpc.RpcError, WireError, ValueError):  # the last: the channel is closed
            return pb.Peers()

    def _take(self, message: pb.ToLearner) -> None:
        client = self._client
        match message.WhichOneof("kind"):
            case "leave":
                client._leave()
            case "parts_at" if self._parts is not None:
                self._parts.at(message.parts_at.addresses)
            case "checkpoint_asked":
                client.put(CheckpointAsked(message.checkpoint_asked))
            case _:
                client.put(EventDelivery(syncer_event(message)))
