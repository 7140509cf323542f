"""How a learner of several hosts keeps its inner optimizer state, and gets it back when it is restarted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.observe import records
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.gift import Gift
from ddiloco.remote.learner.host_copies import HostCopies, OfAllHosts
from ddiloco.remote.learner.likeness import TELLING
from ddiloco.remote.learner.recovery import Checkpointer, ProcessRecovery
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.agreement import WireError
from ddiloco.remote.wire.security import Security
from ddiloco.roles.exchange import InnerState


class HostRecovery(ProcessRecovery):
    """The `Recovery` of host 0: from peers, and on disk, what all hosts can have."""

    def __init__(self, *parts: Any, copies: HostCopies, followers: Followers) -> None:
        super().__init__(*parts)
        self._copies, self._followers = copies, followers
        self._like = 0  # the own copy, if it says what others must be like

    def _gift(self, address: str, versions: tuple[int, ...], security: Security, seconds: float) -> Gift:
        parts = address, versions, self._inner, security, self._config.keepalive, seconds
        return _JointGift(*parts, followers=self._followers, like=self._like)

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        self._like, of_all = 0, self._followers.copies()
        for number, header, blocks in self._copies.readable(of_all):
            if header["run"] == self._client.run:
                if self._undone(header["versions"], versions):
                    return None
                known = None if header["origin"] is None else InnerOrigin(*header["origin"])
                arrays = OfAllHosts(blocks, number)
                self._like = number if header["trained"] >= TELLING else 0
                return InnerState(header["step"], tuple(header["versions"]), arrays, known, header["trained"])
        if of_all:
            told = "its hosts have no copy of the inner optimizer state in common: it begins with a fresh one"
            self._client.outbox.record(records.Alarm(told, time.time()))
        return None


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

    def __init__(self, *parts: Any, copies: HostCopies, followers: Followers) -> None:
        super().__init__(*parts)
        self._copies, self._followers = copies, followers

    def _keep(self, state: InnerState) -> None:
        arrays = state.arrays
        assert isinstance(arrays, OfAllHosts)
        about = {
            "run": self._run_id,
            "step": state.step,
            "trained": state.trained,
            "versions": list(state.versions),
            "origin": None if state.origin is None else dataclasses.astuple(state.origin),
        }
        self._followers.order(pb.Order(save=arrays.number))
        self._copies.save(arrays.number, arrays, about)
