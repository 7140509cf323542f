"""How a learner of several hosts keeps its inner optimizer state, and gets it back when it is restarted."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.observe import records
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_copies import HostCopies, OfAllHosts
from ddiloco.remote.learner.recovery import Checkpointer, ProcessRecovery
from ddiloco.roles.exchange import InnerState


class HostRecovery(ProcessRecovery):
    """The `Recovery` of host 0: the newest copy that all hosts have on disk, else a fresh state."""

    def __init__(self, *parts: Any, copies: HostCopies, followers: Followers) -> None:
        super().__init__(*parts)
        self._copies, self._followers = copies, followers

    def _from_peers(self, versions: tuple[int, ...], least: int, deadline: float) -> None:
        """Peers give whole states, which no host of this learner may have room for."""

    def _from_disk(self) -> InnerState | None:
        of_all = self._followers.copies()
        for number in self._copies.numbers():
            header, blocks = self._copies.load(number)
            if number in of_all and header["run"] == self._client.run:
                known = None if header["origin"] is None else InnerOrigin(*header["origin"])
                arrays = OfAllHosts(blocks, number)
                return InnerState(header["step"], tuple(header["versions"]), arrays, known, header["trained"])
        if of_all:
            told = "its hosts have no copy of the inner optimizer state in common: it begins with a fresh one"
            self._client.outbox.record(records.Alarm(told, time.time()))
        return None


class HostCheckpointer(Checkpointer):
    """Keeps host 0's copies; the others keep theirs as they are asked to make them."""

    def __init__(self, *parts: Any, copies: HostCopies) -> None:
        super().__init__(*parts)
        self._copies = copies

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
        self._copies.save(arrays.number, arrays, about)
