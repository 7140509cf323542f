"""A learner's fragments in host memory, from where the syncer pulls them (paper, "One synchronisation")."""

from __future__ import annotations

import threading

from ddiloco.protocol.messages import Contribution
from ddiloco.roles.transfer import FragmentSnapshot


class Shelf:
    """Holds the newest published snapshot of each fragment; the learner puts, the syncer gets.

    The copy to host memory was started when the snapshot was taken, so `get` seldom waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[int, tuple[Contribution, FragmentSnapshot]] = {}
        self._pulled: dict[int, tuple[Contribution, FragmentSnapshot]] = {}

    def put(self, contribution: Contribution, snapshot: FragmentSnapshot) -> None:
        """Publishes a fragment in place of what was published of it before."""
        with self._lock:
            self._published[contribution.fragment] = (contribution, snapshot)

    def get(self, fragment: int) -> tuple[Contribution, FragmentSnapshot] | None:
        """The newest published snapshot of the fragment, if there is one; it counts as pulled."""
        with self._lock:
            published = self._published.get(fragment)
            if published is not None:
                self._pulled[fragment] = published
            return published

    def take_down(self, fragment: int) -> tuple[Contribution, FragmentSnapshot] | None:
        """Takes a fragment down, since an update overwrites it; gives the last one pulled, if any was."""
        with self._lock:
            self._published.pop(fragment, None)
            return self._pulled.pop(fragment, None)

    def clear(self) -> None:
        """Takes all fragments down."""
        with self._lock:
            self._published.clear()
            self._pulled.clear()
