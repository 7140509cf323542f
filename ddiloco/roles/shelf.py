"""A learner's fragments in host memory, from where the syncer pulls them (paper, "One synchronisation")."""

from __future__ import annotations

import threading

from ddiloco.protocol.messages import Contribution
from ddiloco.roles.transfer import Offer


class Shelf:
    """Holds the newest published offer of each fragment; the learner puts, the syncer pulls.

    The copy to host memory was started when the offer was made, so a pull seldom waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[int, tuple[Contribution, Offer]] = {}
        self._pulled: dict[int, tuple[Contribution, Offer]] = {}

    def put(self, contribution: Contribution, offer: Offer) -> None:
        """Publishes a fragment in place of what was published of it before."""
        with self._lock:
            self._published[contribution.fragment] = (contribution, offer)

    def pull(self, fragment: int) -> tuple[Contribution, Offer] | None:
        """The newest published offer of the fragment, if any; `overwrite` gives the last one pulled."""
        with self._lock:
            published = self._published.get(fragment)
            if published is not None:
                self._pulled[fragment] = published
            return published

    def overwrite(self, fragment: int) -> tuple[Contribution, Offer] | None:
        """Takes a fragment down, since an update overwrites it; the last one pulled of it, if any was."""
        with self._lock:
            self._published.pop(fragment, None)
            return self._pulled.pop(fragment, None)

    def clear(self) -> None:
        """Takes all fragments down."""
        with self._lock:
            self._published.clear()
            self._pulled.clear()
