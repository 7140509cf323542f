"""A learner's inbox: the order of what waits, and of each fragment's updates the newest only."""

import queue
import threading

import pytest

from ddiloco.protocol import events
from ddiloco.workers.exchange import CheckpointAsked, EventDelivery, Leave
from ddiloco.workers.inbox import Inbox


def update(fragment, version):
    return EventDelivery(events.UpdateArrived(fragment, version, version), [[f"{fragment} at {version}"]])


def all_in(inbox):
    found = []
    with pytest.raises(queue.Empty):
        while True:
            found.append(inbox.get(0.0))
    return found


def test_only_the_newest_update_of_a_fragment_waits_in_its_place_among_the_others():
    inbox = Inbox()
    for delivery in (update(0, 1), update(1, 1), CheckpointAsked(1), update(0, 2), Leave(), update(0, 3)):
        inbox.put(delivery)
    assert all_in(inbox) == [update(1, 1), CheckpointAsked(1), Leave(), update(0, 3)]
    inbox.put(update(0, 4))
    assert all_in(inbox) == [update(0, 4)]


def test_who_waits_gets_what_comes_and_in_time_nothing_if_nothing_does():
    inbox = Inbox()
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.01)
    threading.Thread(target=inbox.put, args=(Leave(),)).start()
    assert inbox.get() == Leave()


def test_an_older_update_that_comes_late_replaces_none():
    inbox = Inbox()
    for delivery in (update(0, 6), update(0, 5), update(0, 7), update(0, 4)):
        inbox.put(delivery)
    assert all_in(inbox) == [update(0, 5), update(0, 7), update(0, 4)]  # of which the core drops the last
    inbox.put(update(0, 8))
    assert all_in(inbox) == [update(0, 8)]
