"""Recovery of the inner optimizer state of a learner of several hosts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from ddiloco.remote.learner.donation import Donation
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_arrays import dropped_with
from ddiloco.remote.learner.likeness import MEANINGFUL_STEPS
from ddiloco.remote.learner.recovery import ProcessRecovery
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage import bounded_reads
from ddiloco.storage.learner_state import LearnerState, OfAllHosts
from ddiloco.workers.exchange import InnerState


class HostRecovery(ProcessRecovery):
    """The recovery of host 0: from peers, and on disk, what all hosts can have."""

    def __init__(self, followers: Followers, *parts: Any) -> None:
        super().__init__(*parts)
        self._followers = followers
        self._like = 0  # the own copy, if others must be like it

    def keep(self, state: LearnerState, snapshot: int = 0) -> None:
        """As a ProcessRecovery's; the other hosts keep theirs. One for a snapshot is there once all have."""
        copy = state.arrays.number
        order = pb.Order(save=pb.Order.Save(copy=copy, snapshot=snapshot))
        if not snapshot:
            self._followers.order(order)
            super().keep(state)
            return
        with self._followers.doing(copy, order):
            super().keep(state, snapshot)
            self._followers.done(copy, time.monotonic() + bounded_reads.LONGEST)

    def _taken(self, donation: Donation) -> InnerState:
        """Lets all hosts fetch their blocks; raises WireError if any of them fails."""
        copy, addresses = donation.rest
        if not copy:
            raise WireError("donation to one host")
        arrays = dropped_with(OfAllHosts((), copy), self._followers.order)  # also where it does not come
        left = donation.until - time.monotonic()
        order = pb.Order.Fetch(copy=copy, addresses=addresses, like=self._like, seconds=left)
        with self._followers.doing(copy, pb.Order(fetch=order)):
            state = super()._taken(donation)
            self._followers.done(copy, donation.until)
        arrays += state.arrays
        return dataclasses.replace(state, arrays=arrays)

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        state, self._like = super()._from_disk(versions), 0
        if state is not None and state.trained >= MEANINGFUL_STEPS:
            self._like = state.arrays.number
        return state

    def _shared(self) -> Collection[int]:
        return self._followers.copies()
