"""How what a shard sends of a welcome comes to the learner as one."""

import weakref

import pytest

from ddiloco.protocol import events
from ddiloco.remote.learner.streams import Collector
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.wire.validation import WireError
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import Taker, arrays, assert_same, update, welcome


def test_a_welcome_comes_before_updates_and_is_not_begun_again_when_it_is_asked_for_again():
    down, delivered = Downlink(NewestFragments()), []
    taker, up = Taker(down), Collector(range(2), delivered.append)
    down.put(update(1, 1))
    down.put(welcome(100, step=4, version=1))
    up.take(*taker.next())
    assert not delivered
    down.put(welcome(100, step=4, version=1))
    down.put(update(1, 2, step=8))
    up.take(*taker.next())
    [delivery] = delivered
    assert delivery.event == events.Welcomed(100, 8, (1, 2), (4, 8), (0, 1), (0, 0))  # as new as it could be


def test_a_newer_welcome_takes_the_place_of_one_that_is_half_there():
    down, delivered = Downlink(NewestFragments()), []
    taker, up = Taker(down), Collector(range(2), delivered.append)
    down.put(welcome(100))
    up.take(*taker.next())
    down.put(welcome(101))
    first, second = taker.next(), taker.next()
    up.take(*second)
    assert not delivered, "over several streams it may come first; the old first is no part of it"
    up.take(*first)
    assert [told.event.incarnation for told in delivered] == [101]


def test_updates_amid_a_welcome_come_after_it_the_newest_of_each_fragment():
    """Another stream may bring the rest of the welcome much later."""
    delivered, streams = [], [Downlink(NewestFragments()) for _ in range(2)]
    up, takers = Collector(range(2), delivered.append), list(map(Taker, streams))

    def share(p, version):
        event = events.Welcomed(100, 4, (version,), (version,), (p,))
        streams[p].put(EventDelivery(event, [arrays(p, version)]))
        up.take(*takers[p].next())

    share(0, version=1)
    came = []
    for version in (2, 3, 4):
        streams[0].put(update(0, version))
        header, event, pieces = takers[0].next()
        came.append(weakref.ref(pieces[0]))
        up.take(header, event, pieces)
        del pieces
    assert not delivered
    assert [one() is None for one in came] == [True, True, False]
    share(1, version=1)
    welcomed, later = delivered
    assert welcomed.event.versions == (1, 1)
    assert later.event.version == 4
    assert_same(later.fragments[0], arrays(0, 4))


def test_a_fragment_of_another_shard_is_refused():
    taker = Taker(down := Downlink(NewestFragments()))
    down.put(update(0, 1))
    with pytest.raises(WireError, match="another fragment: 0 from shard 1"):
        Collector([1], pytest.fail, shard=1).take(*taker.next())
