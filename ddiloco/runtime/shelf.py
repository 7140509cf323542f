"""A learner's fragments in host memory, from where the syncer pulls them (paper, "One synchronisation")."""

from __future__ import annotations

import threading

import jax

from ddiloco.protocol.messages import Contribution


class Shelf:
    """Holds the newest published snapshot of each fragment; the learner puts, the syncer gets.

    The copy to host memory was started when the snapshot was taken, so `get` seldom waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[int, tuple[Contribution, tuple[jax.Array, ...]]] = {}

    def put(self, contribution: Contribution, pieces: tuple[jax.Array, ...]) -> None:
        """Publishes a fragment in place of what was published of it before."""
        with self._lock:
            self._published[contribution.fragment] = (contribution, pieces)

    def get(self, fragment: int) -> tuple[Contribution, tuple[jax.Array, ...]] | None:
        """The newest published snapshot of the fragment, if there is one."""
        with self._lock:
            return self._published.get(fragment)

    def clear(self, fragment: int | None = None) -> None:
        """Takes a fragment down, since an update has overwritten it; None: all of them."""
        with self._lock:
            if fragment is None:
                self._published.clear()
            else:
                self._published.pop(fragment, None)
