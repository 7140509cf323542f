"""How a restarted learner continues: its inner optimizer state.

The inner state is, in this order: a peer's that has taken in no fewer steps than the learner's own last copy
on disk, that copy unless its steps were undone, that of another learner in the snapshot that the run
resumes from, a fresh one. Before the first merge no peer is asked: all begin alike, whoever comes first.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import grpc
from etils import epath

from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.learner.gift import Asking, Gift
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.likeness import Comparison
from ddiloco.remote.learner.own_copies import OwnCopies
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError, ended_after
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.bounded_reads import bounded
from ddiloco.telemetry import records
from ddiloco.workers.exchange import InnerState, InnerStateWanted
from ddiloco.workers.inbox import Inbox

_ASK_SECONDS = 5.0  # for the syncer to name the peers
_AT_ONCE = 4  # peers that are asked at the same time; of one the arrays are taken
_LATE_SECONDS = 2.0  # for the other peers to say what they have, after the first one has
Result = TypeVar("Result")


class ProcessRecovery:
    """Where a learner's process finds the state that the syncer does not have, and keeps it for the next."""

    def __init__(
        self,
        client: SyncerClient,
        inner: InnerFormat,
        security: Security,
        config: RemoteConfig,
        copies: OwnCopies,
        stepping: Callable[[bool], None] = lambda steps: None,
    ) -> None:
        """`copies`: the learner's own. `stepping`: told at the first step after a join that the learner
        steps, and where it asks for an inner state that it does not."""
        self.donated: InnerState | None = None  # by a learner of the snapshot that the run resumes from
        self._client, self._inner = client, inner
        self._stepping, self._steps = stepping, False
        self._without = 0  # peers that had nothing to give
        self._security, self._config, self._copies = security, config, copies

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        """The inner state for a learner welcomed with these versions; None: a fresh one."""
        self._steps = False
        self._stepping(False)
        begun = time.monotonic()
        own = self._from_disk(versions)
        patience = self._client.pace.patience(self._config.donation_timeout, self._inner.bytes)
        peers = self._from_peers(versions, own, patience) if any(versions) else None
        sources = {"peer": peers, "checkpoint": own, "snapshot": self.donated}
        found = ((name, state) for name, state in sources.items() if state is not None)
        source, state = next(found, ("fresh", None))
        values = {
            "inner_state": source,
            "donor_step": None if state is None else state.step,
            "trained": 0 if state is None else state.trained,
            "bytes": 0 if state is None else self._inner.bytes,
            "seconds": time.monotonic() - begun,
        }
        self._client.outbox.record(records.Noted("recovered", values, time.time()))
        return state

    def stepped(self) -> None:
        """The learner has finished a step."""
        if not self._steps:
            self._steps = True
            self._stepping(True)

    def keep(self, state: InnerState) -> None:
        """Keeps an own copy on disk; returns once it is durable. Raises OSError."""
        self._copies.keep(state, self._client.run)

    def _from_peers(
        self, versions: tuple[int, ...], own: InnerState | None, patience: float
    ) -> InnerState | None:
        """The peer's state that most steps went into, of those at hand; not one of fewer than the own copy.

        It must be like the own copy, or another peer's; without a copy that of the only peer is taken.
        `patience`: seconds for its bytes, beside the steps after which peers can give it.
        """
        known = self._client.peers(_ASK_SECONDS)
        waiting, deadline = list(known.addresses), time.monotonic() + patience + known.boundary_seconds
        least, comparison = 0 if own is None else own.trained, Comparison(own)
        self._without, peers = 0, len(waiting)
        security = self._security.among_peers(self._client.peers_token)
        asking = Asking(self._inner, security, self._config.keepalive)
        while waiting and (left := deadline - time.monotonic()) > 0:
            asked, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            gifts = [Gift(asking, address, versions, left) for address in asked]
            try:
                opened = sorted(self._opened(gifts, deadline), key=lambda g: g.trained, reverse=True)
                for gift in opened:
                    # One that is slow leaves half to the others, and has none of the time for steps.
                    left = min(deadline - time.monotonic(), patience)
                    with ended_after(left / 2 if waiting or gift is not opened[-1] else left, gift.close):
                        state = self._tried(self._taken, gift) if gift.trained >= least else None
                    if state is not None and comparison.agrees(state):
                        return state
                    del state  # the next one needs the memory
            finally:
                for gift in gifts:
                    gift.close()
        if comparison.unlike:
            self._client.outbox.record(records.Noted("drop", {"reason": "peer: unlike others"}, time.time()))
            problem = "a peer's inner optimizer state is unlike the own copy or others': it is not taken"
            self._client.outbox.record(records.Alarm(problem, time.time()))
        alone = comparison.alone(peers - self._without)
        if alone is None and time.monotonic() >= deadline:
            waited = f"within {patience + known.boundary_seconds:.0f} s, by remote.donation_timeout"
            problem = f"no peer's inner state, of {self._inner.bytes >> 20} MiB, came {waited}"
            self._client.outbox.record(records.Alarm(problem, time.time()))
        return alone

    def _taken(self, gift: Gift) -> InnerState:
        """What a gift that is open holds; raises as it does."""
        return gift.take()

    def _opened(self, gifts: Sequence[Gift], deadline: float) -> list[Gift]:
        """The gifts that peers have described so far, once all have or the rest are late."""
        answers: queue.SimpleQueue[Gift | None] = queue.SimpleQueue()

        def open_one(gift: Gift) -> None:
            answers.put(self._tried(Gift.open, gift))

        for gift in gifts:
            threading.Thread(target=open_one, args=(gift,), name="gift", daemon=True).start()
        opened: list[Gift] = []
        for _ in gifts:
            try:
                gift = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if gift is not None:
                if not opened:
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                opened.append(gift)
        return opened

    def _tried(self, call: Callable[[Gift], Result], gift: Gift) -> Result | None:
        """What the call to a peer gives; None if it fails, counted if what came was wrong.

        A peer that answers but keeps others waiting still counts as having a gift.
        """
        try:
            return call(gift)
        except WireError as error:
            values = {"reason": f"peer: {error.reason}"}
            self._client.outbox.record(records.Noted("drop", values, time.time()))
            self._without += 1
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._without += 1
        except ValueError:  # the gift was closed
            pass
        return None

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        """The newest own copy, unless it has versions that are lost: only where a run is set back are any."""
        try:
            run, shared = self._client.run, self._shared()
            state = bounded(lambda: self._copies.newest(run, shared), self._copies.folder)
        except (ValueError, TimeoutError) as error:
            self._client.outbox.record(records.Alarm(str(error), time.time()))
            return None
        if state is not None and any(a > b for a, b in zip(state.versions, versions, strict=False)):
            values = {"reason": "own copy: of steps that were undone"}
            self._client.outbox.record(records.Noted("drop", values, time.time()))
            return None
        return state

    def _shared(self) -> Collection[int] | None:
        """The numbers of the copies that can be used; None: all."""
        return None


class Checkpointer:
    """Keeps a recent copy of the learner's inner state on disk, in a thread of its own."""

    def __init__(
        self,
        inbox: Inbox,
        keep: Callable[[InnerState], None],
        folder: epath.Path,
        every: float,
        record: Callable[[Any], None],
    ) -> None:
        """`keep`: as a ProcessRecovery's, whose copies are in `folder`. `every`: seconds between two."""
        self._inbox, self._keep, self._folder, self._every = inbox, keep, folder, every
        self._record = record
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inner-checkpoints", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the copy under way; returns whether it ended in time."""
        self._stopping.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            answer: concurrent.futures.Future[InnerState] = concurrent.futures.Future()
            self._inbox.put(InnerStateWanted((), answer))
            try:
                state = self._awaited(answer)
            except Exception:  # it is cancelled, or the learner has told why there is none
                continue
            if state is not None:
                self._save(state)

    def _awaited(self, answer: concurrent.futures.Future[InnerState]) -> InnerState | None:
        while not self._stopping.is_set():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return answer.result(0.2)
        answer.cancel()
        return None

    def _save(self, state: InnerState) -> None:
        try:
            self._keep(state)
        except Exception as error:  # of the disk, of a bucket's library, or no memory for the bytes
            problem = f"{self._folder}: {records.reason(error)}: the inner optimizer state is not kept"
            self._record(records.Alarm(problem, time.time()))
