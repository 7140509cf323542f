"""Links: each quality alone against its closed form."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.virtual.links import Link, LinkQuality

MANY = 20_000


def link(seed=0, **quality):
    return Link(LinkQuality(**quality), random.Random(seed))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=20))
def test_bandwidth_serves_one_message_after_the_other(messages):
    queue = link(bandwidth=64.0, latency=0.5)
    messages.sort(key=lambda message: message[0])
    sent = 0.0
    for now, size in messages:
        sent = max(float(now), sent) + size / 64.0 if size else sent
        assert queue.arrivals(float(now), size) == [(sent if size else now) + 0.5]


def test_jitter_is_exponential_with_its_mean_and_can_reorder():
    delays = [link.arrivals(7.0, 0)[0] - 7.0 for link in [link(jitter=2.0)] for _ in range(MANY)]
    mean = sum(delays) / MANY
    variance = sum((delay - mean) ** 2 for delay in delays) / MANY
    assert mean == pytest.approx(2.0, abs=5 * 2.0 / MANY**0.5)
    assert variance == pytest.approx(4.0, rel=0.1)
    assert min(delays) >= 0.0
    assert delays != sorted(delays)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_share_of_messages_that_vanish_is_the_loss(share):
    lossy = link(loss=share)
    lost = sum(not lossy.arrivals(0.0, 0) for _ in range(MANY)) / MANY
    assert lost == pytest.approx(share, abs=5 * (share * (1 - share) / MANY) ** 0.5)


def test_the_share_of_messages_that_come_twice_is_that_of_duplicates():
    doubling = link(duplicates=0.2, jitter=1.0)
    copies = [doubling.arrivals(0.0, 0) for _ in range(MANY)]
    assert {len(times) for times in copies} == {1, 2}
    twice = [times for times in copies if len(times) == 2]
    assert len(twice) / MANY == pytest.approx(0.2, abs=5 * (0.16 / MANY) ** 0.5)
    assert all(first != second for first, second in twice)


def test_what_is_sent_into_a_partition_vanishes_and_uses_nothing():
    parted = link(bandwidth=10.0)
    parted.cut.add(0)
    assert parted.arrivals(0.0, 10**6) == []
    parted.cut.clear()
    assert parted.arrivals(1.0, 10) == [2.0]


def test_the_same_seed_gives_the_same_arrivals_and_another_one_others():
    quality = {"jitter": 0.5, "loss": 0.2, "duplicates": 0.2, "bandwidth": 100.0}
    first, again, other = (
        [chosen.arrivals(float(now), 50) for now in range(100)]
        for chosen in (link(1, **quality), link(1, **quality), link(2, **quality))
    )
    assert first == again != other
