"""The syncer's links to its learners: one for each incarnation that may still receive messages."""

from __future__ import annotations

import threading
from typing import Protocol

from ddiloco.protocol import events
from ddiloco.workers.exchange import Delivery


class LearnerLink(Protocol):
    """The syncer's link to one incarnation of a learner."""

    def deliver(self, delivery: Delivery) -> None:
        """Sends a delivery, without waiting for the learner; counts its bytes."""

    def begun(self, incarnation: int) -> None:
        """Called once the syncer has admitted this incarnation, so that its work is of this run's history."""


class Links:
    """Links by learner and incarnation. Any thread may set one; only the syncer's uses and drops them."""

    def __init__(self) -> None:
        self._links: dict[int, dict[int, LearnerLink]] = {}  # by learner and incarnation
        self._setting = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._links.values()))

    def set(self, learner: int, incarnation: int, link: LearnerLink) -> None:
        """Sets how to reach an incarnation."""
        with self._setting:
            self._links.setdefault(learner, {})[incarnation] = link

    def deliver(self, receiver: tuple[int, int], delivery: Delivery) -> None:
        """Delivers to (learner, incarnation), if it has a link."""
        link = self._get(*receiver)
        if link is not None:
            link.deliver(delivery)

    def begun(self, learner: int, incarnation: int) -> None:
        """Notifies a link that its incarnation is live."""
        link = self._get(learner, incarnation)
        if link is not None:
            link.begun(incarnation)

    def joined(self, event: events.LearnerJoined) -> None:
        """Drops the entries of earlier incarnations that had the same link as the one that joined."""
        with self._setting:
            own = self._links.get(event.learner, {})
            link = own.get(event.incarnation)
            for earlier in [n for n, known in own.items() if n < event.incarnation and known is link]:
                del own[earlier]

    def lost(self, learner: int, incarnation: int) -> None:
        """Drops the link of a lost incarnation if it is closed; the learner may have reconnected."""
        with self._setting:
            if getattr(self._get(learner, incarnation), "over", False):  # others live as long as the learner
                del self._links[learner][incarnation]

    def _get(self, learner: int, incarnation: int) -> LearnerLink | None:
        return self._links.get(learner, {}).get(incarnation)
