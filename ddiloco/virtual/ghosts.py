"""What a learner did after the syncer's cut and before its own, as far as others notice it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution
from ddiloco.virtual.calendar import Calendar
from ddiloco.virtual.links import Link
from ddiloco.virtual.ports import Observer

Told = tuple[str, tuple[Any, ...]]  # a method of Observer, and what it was called with


class Relay(Observer):
    """Passes on what a fleet tells, and keeps what learners tell while `kept` is a list."""

    def __init__(self, observer: Observer) -> None:
        self.kept: list[Told] | None = None
        self._observer = observer

    def tell(self, name: str, *told: Any) -> None:
        """Calls a method of the observer."""
        if self.kept is not None:
            self.kept.append((name, told))
        getattr(self._observer, name)(*told)

    def syncer_handled(self, event: events.SyncerEvent, out: list[Any], now: float) -> None:
        """Passes it on."""
        self._observer.syncer_handled(event, out, now)

    def learner_handled(self, learner: Any, event: events.LearnerEvent, out: list[Any], now: float) -> None:
        """Passes it on; tapes hear of it, and a tape begins where its actor is put back."""
        self._observer.learner_handled(learner, event, out, now)

    def pulled(self, learner: Any, contribution: Contribution, now: float) -> None:
        """Passes it on, as the one before."""
        self._observer.pulled(learner, contribution, now)

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        """Passes it on."""
        self.tell("stepped", learner, clock, tokens, metrics, now)

    def entered(self, learner: int, state: State, chips: int, now: float) -> None:
        """Passes it on."""
        self.tell("entered", learner, state, chips, now)

    def noted(self, name: str, values: Mapping[str, Any], now: float) -> None:
        """Passes it on."""
        self._observer.noted(name, values, now)

    def dropped(self, drop: actions.Drop, now: float) -> None:
        """Passes it on."""
        self.tell("dropped", drop, now)

    def transferred(self, learner: int, sent: int, received: int) -> None:
        """Passes it on."""
        self.tell("transferred", learner, sent, received)

    def merged(self, merge: actions.Merge, now: float) -> None:
        """Passes it on."""
        self._observer.merged(merge, now)


class Ghost:
    """One event of a learner that its recorded state holds already, but the syncer's does not.

    At its time it tells the observer what the event told, and counts the entries that the event made in the
    calendar: they are there from the start. So all that others do in between happens in the same order.
    """

    def __init__(
        self,
        learner: int,
        told: Sequence[Told],
        entered: int,
        cut: bool,
        relay: Relay,
        calendar: Calendar,
        down: Link,
    ) -> None:
        """`cut`: whether the syncer's way to the learner was cut after the event. `entered`: entries made."""
        self.learner, self.told, self.entered, self.cut = learner, tuple(told), entered, cut
        self._relay, self._calendar, self._down = relay, calendar, down

    def __call__(self) -> None:
        """Happens."""
        for name, told in self.told:
            self._relay.tell(name, *told)
        self._calendar.skip(self.entered)
        self._down.cut = self.cut
