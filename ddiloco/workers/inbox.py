"""The inbox of a learner's thread: only the newest update of each fragment, however long a step takes."""

from __future__ import annotations

import queue
import threading
import time

from ddiloco.protocol import events
from ddiloco.workers.exchange import Delivery, EventDelivery


class Inbox:
    """Deliveries in order; a newer update of a fragment replaces a queued one.

    Over several connections an older update may arrive later; it is queued too, and the core drops it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[list[Delivery]] = queue.SimpleQueue()  # none left in it: superfluous
        self._newest: dict[int, list[Delivery]] = {}  # by fragment

    def put(self, delivery: Delivery) -> EventDelivery | None:
        """Adds a delivery; never waits. Returns the update that it replaces, which will not be delivered."""
        held, replaced = [delivery], None
        fragment = _updated(delivery)
        if fragment is not None:
            with self._lock:
                waiting = self._newest.get(fragment, [])
                if not waiting or waiting[0].event.version < delivery.event.version:
                    replaced = waiting.pop() if waiting else None
                    self._newest[fragment] = held
        self._waiting.put(held)
        return replaced

    def get(self, timeout: float | None = None) -> Delivery:
        """The oldest delivery; waits for one. Raises queue.Empty after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            held = self._waiting.get(timeout=left)
            with self._lock:
                if held:
                    fragment = _updated(held[0])
                    if fragment is not None and self._newest.get(fragment) is held:
                        del self._newest[fragment]
                    return held[0]


def _updated(delivery: Delivery) -> int | None:
    """The fragment that the delivery updates, if it does."""
    match delivery:
        case EventDelivery(events.UpdateArrived(fragment=fragment)):
            return fragment
    return None
