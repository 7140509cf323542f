"""One learner's connection on the syncer's side: messages for it, and pulls that it has to answer."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.downlink import Downlink, NewestFragments
from ddiloco.remote.wire.event_messages import from_syncer
from ddiloco.roles.exchange import Delivery, Leave, SnapshotBegun, Told

Contributed = tuple[Contribution, Sequence[np.ndarray]]

MOST_WAITING = 256  # messages to a learner that does not read; then the oldest is lost, as any may be


class Session:
    """A LearnerLink over one control stream. Used by the syncer's threads and by gRPC's."""

    def __init__(
        self,
        name: str,
        learner: int,
        process: int,
        newest: NewestFragments,
        pull_timeout: float,
        numbers: Iterator[int],
        donor: str | None = None,
    ) -> None:
        """`name` is known only to this learner; `pull_timeout` is in seconds; `numbers` are those of pulls.

        No two sessions may have a pull of the same number: an answer to an old one may come late.
        """
        self.name, self.learner, self.process = name, learner, process
        self.donor = donor  # HOST:PORT at which the learner answers its peers
        self.incarnation = 0  # the newest that has joined or reported over this connection
        self.reason = "connection lost"  # why it ended
        self.down = Downlink(newest)
        self.lost_messages = 0
        self._pull_timeout = pull_timeout
        self._change = threading.Condition()
        self._waiting: collections.deque[pb.ToLearner] = collections.deque()
        self._numbers = numbers
        self._pulls: dict[int, tuple[int, concurrent.futures.Future[Contributed | None]]] = {}
        self._closed = False

    # What the syncer calls.

    def deliver(self, delivery: Delivery) -> None:
        """Queues something for the learner without waiting for it."""
        match delivery:
            case Told(events.Welcomed() | events.UpdateArrived()):
                self.down.put(delivery)
            case Told(event):
                self.say(from_syncer(event), replaces=isinstance(event, events.ClockSet))
            case SnapshotBegun():
                self.down.begun(delivery)
                self.say(pb.ToLearner(snapshot_begun=pb.SnapshotBegun(snapshot=delivery.number)))
            case Leave():
                self.say(pb.ToLearner(leave=pb.Leave()))

    def pull(self, fragment: int) -> Contributed | None:
        """Asks for a fragment and waits for the answer; None if the learner has none published.

        Raises:
          ConnectionError: the connection ends, or the learner cannot send it.
          TimeoutError: it does not come within the pull timeout.
        """
        answer: concurrent.futures.Future[Contributed | None] = concurrent.futures.Future()
        with self._change:
            if self._closed:
                raise ConnectionError("not connected")
            number = next(self._numbers)
            self._pulls[number] = (fragment, answer)
        self.say(pb.ToLearner(pull=pb.Pull(pull=number, fragment=fragment)))
        try:
            return answer.result(self._pull_timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError("the fragment did not come in time") from None
        finally:
            with self._change:
                self._pulls.pop(number, None)

    def say(self, message: pb.ToLearner, replaces: bool = False) -> None:
        """Puts a message into the control stream; with `replaces` in place of those of its kind."""
        with self._change:
            if replaces:
                others = [m for m in self._waiting if _kind(m) != _kind(message)]
                self._waiting = collections.deque(others)
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.lost_messages += 1
            self._waiting.append(message)
            self._change.notify_all()

    # What the server calls.

    def answer_of(self, pull: int) -> tuple[int, concurrent.futures.Future[Contributed | None]] | None:
        """Takes the fragment and the open answer of a pull; a second answer finds none."""
        with self._change:
            return self._pulls.pop(pull, None)

    def messages(self) -> Iterator[bytes]:
        """What the control stream sends; ends when the session is closed, after all earlier messages."""
        while True:
            with self._change:
                while not self._waiting:
                    if self._closed:
                        return
                    self._change.wait()
                message = self._waiting.popleft()
            yield message.SerializeToString()

    def close(self, reason: str) -> bool:
        """Ends the streams and gives up the pulls; returns whether the session was open."""
        with self._change:
            if self._closed:
                return False
            self._closed, self.reason = True, reason
            pulls, self._pulls = self._pulls, {}
            self._change.notify_all()
        self.down.close()
        for _, answer in pulls.values():
            answer.set_exception(ConnectionError(reason))
        return True


def _kind(message: pb.ToLearner) -> str | None:
    return message.event.WhichOneof("kind") or message.WhichOneof("kind")
