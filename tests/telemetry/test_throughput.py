"""Waits for large things go by how fast others of a known size have moved."""

import pytest

from ddiloco.protocol.policy import TIMEOUT_SLACK
from ddiloco.telemetry.throughput import UNMEASURED, Throughput
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import LearnerEnd, SyncerEnd, ended, joined, update, welcome


def test_a_timeout_is_the_setting_and_more_for_many_bytes_over_a_slow_link():
    throughput = Throughput()
    assert throughput.timeout(30.0, 10**12) == 30.0, "nothing is known before a welcome"
    assert (
        throughput.limit(30.0, 10**12) == UNMEASURED and throughput.limit(2 * UNMEASURED, 1) == 2 * UNMEASURED
    )
    throughput.add(10**9, 4.0)
    throughput.add(10**9, 6.0)
    assert throughput.timeout(30.0, 74 * 10**9) == pytest.approx(30.0 + TIMEOUT_SLACK * 74 * 5.0)
    assert throughput.limit(30.0, 74 * 10**9) == throughput.timeout(30.0, 74 * 10**9)


def test_a_welcome_measures_throughput_and_an_update_does_not():
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        link = joined(syncer, learner)
        link.deliver(update(0, 1))
        learner.next(EventDelivery)
        assert learner.client.throughput.timeout(1.0, 10**15) == 1.0
        link.deliver(welcome(100))
        learner.next(EventDelivery)
        assert learner.client.throughput.timeout(1.0, 10**15) > 100.0, "a million megabytes take minutes"
