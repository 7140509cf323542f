"""Makes a syncer follow the timing in its operator's orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.protocol.events import TimingSet
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.settings.timing import timing_of
from ddiloco.storage.operator_orders import StandingOrders


class Retiming:
    """Sends a syncer's core each timing that is ordered. Used by one thread at a time."""

    def __init__(self, sync: SyncPolicy, send: Callable[[TimingSet], None]) -> None:
        """`sync`: the policy of the run's settings. `send` takes an event for the core."""
        self._sync, self._send = sync, send
        self._followed: Mapping[str, Any] = {}

    def check(self, changes: Mapping[str, Any]) -> None:
        """Raises ConfigError unless the run can have this timing."""
        timing_of(self._sync, changes)

    def follow(self, orders: StandingOrders) -> None:
        """Sends the ordered timing if it is another than before; may raise ConfigError."""
        if orders.timing != self._followed:
            self._send(timing_of(self._sync, orders.timing, orders.reason))
            self._followed = orders.timing
