"""How a learner of several hosts keeps its inner optimizer state, and gets it back when it is restarted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.gift import Gift
from ddiloco.remote.learner.likeness import TELLING
from ddiloco.remote.learner.own_copies import OfAllHosts
from ddiloco.remote.learner.recovery import Checkpointer, ProcessRecovery
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError
from ddiloco.remote.wire.security import Security
from ddiloco.roles.exchange import InnerState


class HostRecovery(ProcessRecovery):
    """The `Recovery` of host 0: from peers, and on disk, what all hosts can have."""

    def __init__(self, followers: Followers, *parts: Any) -> None:
        super().__init__(*parts)
        self._followers = followers
        self._like = 0  # the own copy, if it says what others must be like

    def _gift(self, address: str, versions: tuple[int, ...], security: Security, seconds: float) -> Gift:
        parts = address, versions, self._inner, security, self._config.keepalive, seconds
        return _JointGift(*parts, followers=self._followers, like=self._like)

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        state, self._like = super()._from_disk(versions), 0
        if state is not None and state.trained >= TELLING:
            self._like = state.arrays.number
        return state

    def _shared(self) -> Collection[int]:
        return self._followers.copies()


class _JointGift(Gift):
    """A peer's gift to all hosts: each fetches its own blocks."""

    def __init__(self, *parts: Any, followers: Followers, like: int) -> None:
        super().__init__(*parts)
        self._followers, self._like = followers, like

    def take(self) -> InnerState:
        """As a Gift's; raises WireError, too, where another host does not come to its blocks."""
        copy, addresses = self.rest
        if not copy:
            raise WireError("donation to one host")
        left = self.until - time.monotonic()
        order = pb.Order.Fetch(copy=copy, addresses=addresses, like=self._like, seconds=left)
        with self._followers.doing(copy, pb.Order(fetch=order)):
            state = super().take()
            self._followers.done(copy, self.until)
        return dataclasses.replace(state, arrays=OfAllHosts(state.arrays, copy))


class HostCheckpointer(Checkpointer):
    """Has all hosts keep their copies."""

    def __init__(self, followers: Followers, *parts: Any) -> None:
        super().__init__(*parts)
        self._followers = followers

    def _keep(self, state: InnerState) -> None:
        self._followers.order(pb.Order(save=state.arrays.number))
        super()._keep(state)
