"""How what the syncer, or each of its parts, sends of a welcome comes to the learner as one."""

import weakref

from ddiloco.protocol import events
from ddiloco.remote.learner.streams import Collector
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import Taker, arrays, assert_same, update, welcome


def test_a_welcome_comes_before_updates_and_is_not_begun_again_when_it_is_asked_for_again():
    down, delivered = Downlink(NewestFragments()), []
    taker, up = Taker(down), Collector(2, delivered.append)
    down.put(update(1, 1))
    down.put(welcome(100, step=4, version=1))
    up.take(*taker.next())
    assert not delivered
    down.put(welcome(100, step=4, version=1))
    down.put(update(1, 2, step=8))
    up.take(*taker.next())
    [delivery] = delivered
    assert delivery.event == events.Welcomed(100, 8, (1, 2), (4, 8), lineages=(0, 0))  # as new as it could be


def test_a_newer_welcome_takes_the_place_of_one_that_is_half_there():
    down, delivered = Downlink(NewestFragments()), []
    taker, up = Taker(down), Collector(2, delivered.append)
    down.put(welcome(100))
    up.take(*taker.next())
    down.put(welcome(101))
    first, second = taker.next(), taker.next()
    up.take(*second)
    assert not delivered, "over several streams it may come first; the old first is no part of it"
    up.take(*first)
    assert [told.event.incarnation for told in delivered] == [101]


def test_what_a_part_that_came_back_welcomes_with_again_is_an_update_if_it_is_newer():
    delivered, newest = [], NewestFragments()
    up = Collector(2, delivered.append)
    taker = Taker(first := Downlink(newest))
    first.put(welcome(100, step=4, version=1))
    up.take(*taker.next())
    assert not delivered
    up.take(*taker.next())
    assert isinstance(delivered.pop().event, events.Welcomed)
    taker = Taker(again := Downlink(newest))  # of the part's next connection, which knows of nothing sent
    update_of_then = EventDelivery(events.UpdateArrived(0, 2, 8), [arrays(0, 2)])
    again.put(welcome(100, step=4, version=1))
    again.put(update_of_then)
    up.take(*taker.next())
    delivery = delivered.pop()
    assert (delivery.event.fragment, delivery.event.version) == (0, 2)
    assert_same(delivery.fragments[0], arrays(0, 2))
    up.take(*taker.next())
    assert not delivered, "the other is as it was"


def test_updates_amid_a_welcome_of_several_parts_come_after_it_the_newest_of_each_fragment():
    """A part that is away may keep the welcome open for long; the others have sent their shares."""
    delivered, parts = [], [Downlink(NewestFragments()) for _ in range(2)]
    up, takers = Collector(2, delivered.append), list(map(Taker, parts))

    def share(p, version):
        event = events.Welcomed(100, 4, (version,), (version,), (p,))
        parts[p].put(EventDelivery(event, [arrays(p, version)]))
        up.take(*takers[p].next())

    share(0, version=1)
    came = []
    for version in (2, 3, 4):
        parts[0].put(update(0, version))
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


def test_of_a_part_that_came_back_amid_a_welcome_nothing_from_before_counts():
    """Its disk may be an older one: what it had sent was undone."""
    delivered = []
    up = Collector(2, delivered.append)
    taker = Taker(first := Downlink(NewestFragments()))
    first.put(EventDelivery(events.Welcomed(100, 4, (5,), (5,), (0,)), [arrays(0, 5)]))
    up.take(*taker.next())
    first.put(update(0, 6))
    up.take(*taker.next())
    taker = Taker(again := Downlink(NewestFragments()))
    again.put(EventDelivery(events.Welcomed(100, 4, (3, 1), (3, 1)), [arrays(0, 3), arrays(1, 1)]))
    up.take(*taker.next())
    up.take(*taker.next())
    assert [told.event.versions for told in delivered] == [(3, 1)]
