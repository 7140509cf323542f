"""Recovery of a restarted learner's inner optimizer state.

In this order: a peer's state with no fewer steps than the learner's own last copy on disk; that copy, unless
its steps were undone; a fresh one. Before the first merge no peer is asked: all start alike.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import grpc

from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.learner.donation import Donation, Recipient
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.likeness import Comparison
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError, ended_after
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.bounded_reads import bounded
from ddiloco.storage.learner_state import LearnerState, LearnerStates
from ddiloco.telemetry import records
from ddiloco.telemetry.throughput import is_slow, told_slow
from ddiloco.workers.exchange import InnerState
from ddiloco.workers.resuming import inner_of

_ASK_SECONDS = 5.0  # for the syncer to name the peers
_AT_ONCE = 4  # peers that are asked at the same time; one of them sends its arrays
_LATE_SECONDS = 2.0  # for the headers of the other peers, after the first one's
Result = TypeVar("Result")


class ProcessRecovery:
    """Finds and keeps the state of a learner's process that the syncer does not have."""

    def __init__(
        self,
        client: SyncerClient,
        inner: InnerFormat,
        security: Security,
        config: RemoteConfig,
        states: LearnerStates,
        stepping: Callable[[bool], None] = lambda steps: None,
    ) -> None:
        """`states`: the learner's own.

        `stepping`: called with whether the learner steps, at its first step after a join, and when it
        requests an inner state.
        """
        self._client, self._inner = client, inner
        self._stepping, self._steps = stepping, False
        self._without = 0  # peers that had nothing to give
        self._security, self._config, self._states = security, config, states

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        """The inner state for a learner welcomed with these versions; None: a fresh one."""
        self._steps = False
        self._stepping(False)
        begun = time.monotonic()
        own = self._from_disk(versions)
        timeout = self._client.throughput.timeout(self._config.donation_timeout, self._inner.bytes)
        peers = self._from_peers(versions, own, timeout) if any(versions) else None
        sources = {"peer": peers, "checkpoint": own}
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

    def keep(self, state: LearnerState, snapshot: int = 0) -> None:
        """Keeps the learner's state, for the snapshot with this number, 0: in the place of the newest.

        Returns once it is durable. Raises OSError, or WireError where another host has not kept its own.
        """
        (self._states.of_snapshot(snapshot) if snapshot else self._states).keep(state)

    def newest(self) -> LearnerState | None:
        """The learner's newest state of this run, where there is one; an alarm if none can be read."""
        try:
            run, shared = self._client.run, self._shared()
            return bounded(lambda: self._states.newest(run, shared), self._states.folder)
        except (ValueError, TimeoutError) as error:
            self._client.outbox.record(records.Alarm(str(error), time.time()))
            return None

    def _from_peers(
        self, versions: tuple[int, ...], own: InnerState | None, timeout: float
    ) -> InnerState | None:
        """The available peer's state with most steps; not one with fewer than the own copy.

        It must be close to the own copy, or to another peer's; without a copy that of the only peer is used.
        `timeout`: seconds for its bytes, beside the steps until peers can give it.
        """
        known = self._client.peers(_ASK_SECONDS)
        waiting, deadline = list(known.addresses), time.monotonic() + timeout + known.boundary_seconds
        least, comparison = 0 if own is None else own.trained, Comparison(own)
        self._without, peers = 0, len(waiting)
        security = self._security.among_peers(self._client.peers_token)
        recipient = Recipient(self._inner, security, self._config.keepalive)
        while waiting and (left := deadline - time.monotonic()) > 0:
            asked, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            donations = [Donation(recipient, address, versions, left) for address in asked]
            try:
                opened = sorted(self._opened(donations, deadline), key=lambda d: d.trained, reverse=True)
                for donation in opened:
                    # One that is slow leaves half to the others, and has none of the time for steps.
                    begun = time.monotonic()
                    left = min(deadline - begun, timeout)
                    with ended_after(
                        left / 2 if waiting or donation is not opened[-1] else left, donation.close
                    ):
                        state = self._tried(self._taken, donation) if donation.trained >= least else None
                    if state is not None:
                        self._timed(time.monotonic() - begun)
                    if state is not None and comparison.agrees(state):
                        return state
                    del state  # the next one needs the memory
            finally:
                for donation in donations:
                    donation.close()
        if comparison.unlike:
            self._client.outbox.record(records.Noted("drop", {"reason": "peer: unlike others"}, time.time()))
            problem = "a peer's inner optimizer state is unlike the own copy or others': it is not taken"
            self._client.outbox.record(records.Alarm(problem, time.time()))
        alone = comparison.alone(peers - self._without)
        if alone is None and time.monotonic() >= deadline:
            waited = f"within {timeout + known.boundary_seconds:.0f} s, by remote.donation_timeout"
            problem = f"no peer's inner state, of {self._inner.bytes >> 20} MiB, came {waited}"
            self._client.outbox.record(records.Alarm(problem, time.time()))
        return alone

    def _taken(self, donation: Donation) -> InnerState:
        """What an open donation holds; raises as it does."""
        return donation.take()

    def _timed(self, seconds: float) -> None:
        """Raises an alarm if a peer's state came far slower than the syncer's fragments."""
        rate = self._client.throughput.rate
        if rate is not None and is_slow(self._inner.bytes, seconds, rate):
            slow = told_slow(self._inner.bytes, seconds, rate)
            problem = f"a peer's inner state of {slow} from the syncer (config.remote.interface)"
            self._client.outbox.record(records.Alarm(problem, time.time()))

    def _opened(self, donations: Sequence[Donation], deadline: float) -> list[Donation]:
        """The donations that peers have described so far, once all have or the rest are late."""
        answers: queue.SimpleQueue[Donation | None] = queue.SimpleQueue()

        def open_one(donation: Donation) -> None:
            answers.put(self._tried(Donation.open, donation))

        for donation in donations:
            threading.Thread(target=open_one, args=(donation,), name="donation", daemon=True).start()
        opened: list[Donation] = []
        for _ in donations:
            try:
                donation = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if donation is not None:
                if not opened:
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                opened.append(donation)
        return opened

    def _tried(self, call: Callable[[Donation], Result], donation: Donation) -> Result | None:
        """What the call to a peer gives; None if it fails, counted if what came was wrong.

        A peer that answers but keeps others waiting still counts as having a donation.
        """
        try:
            return call(donation)
        except WireError as error:
            values = {"reason": f"peer: {error.reason}"}
            self._client.outbox.record(records.Noted("drop", values, time.time()))
            self._without += 1
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._without += 1
        except ValueError:  # the donation was closed
            pass
        return None

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        """That of the newest own state, unless it has versions that are lost, as where a run is set back."""
        found = self.newest()
        if found is None:
            return None
        state = inner_of(found)
        if not self._inner.fits(state.arrays):
            problem = "the learner's last state is of another inner optimizer: it is not used"
            self._client.outbox.record(records.Alarm(problem, time.time()))
            return None
        if any(a > b for a, b in zip(state.versions, versions, strict=False)):
            values = {"reason": "own copy: of steps that were undone"}
            self._client.outbox.record(records.Noted("drop", values, time.time()))
            return None
        return state

    def _shared(self) -> Collection[int] | None:
        """The numbers of the copies that can be used; None: all."""
        return None
