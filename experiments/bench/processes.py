"""Two processes at the ends of a wire: one follows orders, a learner's end is in the other."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.terms import Terms
from ddiloco.roles.transfer import Offer
from ddiloco.settings.remote import RemoteConfig

PATIENCE = 120.0
CONFIG = RemoteConfig(gather=PATIENCE)


@contextlib.contextmanager
def another_process(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `work(pipe, *arguments)` in a fresh process until the block ends; this end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the end of the other process is seen here
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def heard(pipe: Connection) -> Any:
    """What the other process says next.

    Raises:
      TimeoutError: it says nothing.
      EOFError: it has ended.
    """
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"the other process said nothing in {PATIENCE:g} s")
    return pipe.recv()


class LearnerEnd:
    """A learner's end of the wire, with no training behind it."""

    def __init__(self, address: str, learner: int, terms: Terms) -> None:
        self.inbox, self.learner = queue.SimpleQueue(), learner
        self._asked: set[RoundId] = set()
        self._updates: collections.deque[events.UpdateArrived] = collections.deque()
        self._client = SyncerClient(address, learner, 1, terms, Security(), CONFIG)
        self._client.attach(self.inbox)
        self._client.start()

    def send(self, event: Any) -> None:
        """Tells the syncer."""
        self._client.outbox.send(event)

    def join(self) -> None:
        """Joins, and waits for the welcome."""
        self.send(events.LearnerJoined(self.learner, 1))
        assert isinstance(self.inbox.get(timeout=PATIENCE).event, events.Welcomed)

    def offer(self, round_id: RoundId, version: int, arrays: tuple) -> None:
        """Offers a fragment once it is asked for: one step of ten tokens since this version."""
        while round_id not in self._asked:
            self._hear()
        self._asked.remove(round_id)
        contribution = Contribution(self.learner, 1, round_id.fragment, version, round_id.step, 1, 10)
        self._client.send_offer(round_id, contribution, Offer(arrays))

    def report(self, step: int, versions: list[int]) -> None:
        """Reports a step, with the version of each fragment."""
        counters = tuple(FragmentCounters(version, 1, 10) for version in versions)
        self.send(events.StepReported(Report(self.learner, 1, step, counters)))

    def update(self) -> events.UpdateArrived:
        """The next update."""
        while not self._updates:
            self._hear()
        return self._updates.popleft()

    def _hear(self) -> None:
        match self.inbox.get(timeout=PATIENCE).event:
            case events.OfferAsked(round=round_id):
                self._asked.add(round_id)
            case events.UpdateArrived() as update:
                self._updates.append(update)

    def close(self) -> None:
        """Leaves."""
        self._client.finish(1.0)
