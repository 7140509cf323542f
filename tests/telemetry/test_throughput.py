"""Waits for large things go by how fast others of a known size have moved."""

import pytest

from ddiloco.protocol.policy import ALLOWANCE
from ddiloco.telemetry.throughput import UNMEASURED, Pace
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import LearnerEnd, SyncerEnd, ended, joined, update, welcome


def test_patience_is_the_setting_and_more_for_many_bytes_over_a_slow_link():
    pace = Pace()
    assert pace.patience(30.0, 10**12) == 30.0, "nothing is known before a welcome"
    assert pace.limit(30.0, 10**12) == UNMEASURED and pace.limit(2 * UNMEASURED, 1) == 2 * UNMEASURED
    pace.add(10**9, 4.0)
    pace.add(10**9, 6.0)
    assert pace.patience(30.0, 74 * 10**9) == pytest.approx(30.0 + ALLOWANCE * 74 * 5.0)
    assert pace.limit(30.0, 74 * 10**9) == pace.patience(30.0, 74 * 10**9)


def test_a_welcome_tells_the_pace_and_an_update_does_not():
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        link = joined(syncer, learner)
        link.deliver(update(0, 1))
        learner.next(EventDelivery)
        assert learner.client.pace.patience(1.0, 10**15) == 1.0
        link.deliver(welcome(100))
        learner.next(EventDelivery)
        assert learner.client.pace.patience(1.0, 10**15) > 100.0, "a million megabytes take minutes"
