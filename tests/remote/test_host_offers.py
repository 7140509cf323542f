"""What the hosts of a learner send and get: their own blocks, of the same versions."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.arrays.blocks import Blocks, Cut
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.syncer.downlink import MAX_AHEAD, Downlink, NewestFragments
from ddiloco.remote.syncer.session import HostOffers
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message, cuts_of, receive_blocks, wanted_cuts
from ddiloco.remote.wire.event_messages import update_of
from ddiloco.remote.wire.payload import chunks, payload_bytes
from ddiloco.remote.wire.validation import WireError
from tests.remote.ends import FORMATS, streamed, until, update, welcome

LAST = 200  # version
F32 = np.dtype(np.float32)
FORMAT = (ArrayFormat((4, 6), F32), ArrayFormat((3,), F32))
WHOLE = (np.arange(24, dtype=F32).reshape(4, 6), np.float32([1, 2, 3]))
# Of the first array, in another shape of as many elements, a half each; the second is host 0's.
CUTS = (
    [Cut((8, 3), (((0, 4), (0, 1)), ((4, 8), (0, 1)))), Cut((3,), (((0, 3),),))],
    [Cut((8, 3), (((0, 4), (1, 3)), ((4, 8), (1, 3)))), Cut((3,), ())],
)


def blocks(host):
    return [
        Blocks(cut.shape, dict(zip(cut.boxes, cut.of(whole), strict=True)))
        for cut, whole in zip(CUTS[host], WHOLE, strict=True)
    ]


def offer(step=8, tokens=64):
    return events.FragmentArrived(RoundId(step, 1), Contribution(0, 5, 1, 3, 2, tokens, step))


def sent(parts):
    return list(chunks([block for part in parts for block in part.blocks.values()]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_of_all_hosts_are_the_offer_in_whatever_order_they_come(order):
    offers = HostOffers(2)
    first, second = order
    assert offers.add(first, offer(), FORMAT, blocks(first)) is None
    whole = offers.add(second, offer(), FORMAT, blocks(second))
    for got, wanted in zip(whole, WHOLE, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_blocks_travel_with_where_they_lie():
    for host in (0, 1):
        messages = [pb.Cut.FromString(cut_message(cut).SerializeToString()) for cut in CUTS[host]]
        cuts = cuts_of(messages, FORMAT)
        assert cuts == CUTS[host]
        size = payload_bytes([block for part in blocks(host) for block in part.blocks.values()])
        got = receive_blocks(FORMAT, cuts, size, iter(sent(blocks(host))))
        for mine, theirs in zip(got, blocks(host), strict=True):
            assert mine.cut == theirs.cut
            for box, block in mine.blocks.items():
                np.testing.assert_array_equal(block, theirs.blocks[box])


def test_blocks_that_overlap_or_leave_gaps_are_no_offer():
    for second in ([*CUTS[0]], [Cut((8, 3), (((0, 4), (1, 3)),)), Cut((3,), ())]):
        offers = HostOffers(2)
        offers.add(0, offer(), FORMAT, blocks(0))
        part = [
            Blocks(cut.shape, dict(zip(cut.boxes, cut.of(whole), strict=True)))
            for cut, whole in zip(second, WHOLE, strict=True)
        ]
        with pytest.raises(WireError, match="no fragment"):
            offers.add(1, offer(), FORMAT, part)


def later(step):
    """Another offer for the same round."""
    return events.FragmentArrived(RoundId(8, 1), Contribution(0, 5, 1, 3, step, 2, 64))


def test_a_later_offer_for_the_same_round_takes_the_place_of_one_that_broke():
    offers = HostOffers(2)
    offers.add(0, later(8), FORMAT, blocks(0))  # the other host's transfer of this breaks
    offers.add(0, later(9), FORMAT, blocks(0))
    with pytest.raises(WireError, match="a newer one has arrived"):
        offers.add(1, later(8), FORMAT, blocks(1))
    assert offers.add(1, later(9), FORMAT, blocks(1)) is not None


def test_an_offer_that_is_sent_again_as_it_was_begins_anew_with_the_host_that_repeats_itself():
    offers = HostOffers(2)
    for _ in range(2):
        assert offers.add(0, offer(), FORMAT, blocks(0)) is None
    assert offers.add(1, offer(), FORMAT, blocks(1)) is not None


def test_hosts_must_say_the_same_of_an_offer():
    offers = HostOffers(2)
    offers.add(0, offer(), FORMAT, blocks(0))
    with pytest.raises(WireError, match="hosts differ"):
        offers.add(1, offer(tokens=65), FORMAT, blocks(1))


def test_a_newer_round_takes_the_place_of_one_that_never_became_whole():
    offers = HostOffers(2)
    offers.add(0, offer(), FORMAT, blocks(0))
    assert offers.add(0, offer(step=16), FORMAT, blocks(0)) is None
    assert offers.add(1, offer(step=16), FORMAT, blocks(1)) is not None


@pytest.mark.parametrize(
    "message",
    [
        pb.Cut(shape=[4, 5], count=0),  # of another number of elements
        pb.Cut(shape=[4, 6], count=1, bounds=[0, 4, 0]),
        pb.Cut(shape=[4, 6], count=1, bounds=[0, 5, 0, 6]),
        pb.Cut(shape=[4, 6], count=1, bounds=[3, 2, 0, 6]),
        pb.Cut(shape=[4, 6], count=2, bounds=[0, 4, 0, 6] * 2),  # twice the memory
        pb.Cut(shape=[1] * 40 + [24], count=0),
        pb.Cut(shape=[24], count=5000, bounds=[0, 0] * 5000),
    ],
)
def test_blocks_that_cannot_be_are_refused_before_they_take_memory(message):
    with pytest.raises(WireError):
        cuts_of([message], FORMAT[:1])


def test_blocks_of_another_number_of_arrays_are_refused():
    with pytest.raises(WireError, match="another fragment"):
        wanted_cuts(pb.Wanted(arrays=[pb.Cut(shape=[4, 6])]), [FORMAT])


class Taker(threading.Thread):
    """One host's stream, taken off as its own thread comes to it."""

    def __init__(self, down, host):
        super().__init__(daemon=True)
        self.headers = []
        self._messages = streamed(down, host)
        self.start()

    def newest(self):
        return {fragment: version for fragment, version, _ in list(self.headers)}

    def run(self):
        while (data := next(self._messages, None)) is not None:
            header = pb.DownHeader.FromString(data)
            left = header.size
            while left:
                left -= len(next(self._messages))
            event = update_of(header, 2)
            self.headers.append((event.fragment, event.version, header.welcome))


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=12))
def test_all_hosts_get_the_same_versions_in_the_same_order(changes):
    down, versions = Downlink(NewestFragments(), hosts=3), [0, 0]
    takers = [Taker(down, host) for host in range(3)]
    incarnation = 1
    down.put(welcome(1))
    for fragment, again in changes:
        versions[fragment] += 1
        down.put(update(fragment, versions[fragment]))
        if again:
            incarnation += 1
            down.put(welcome(incarnation))
    for fragment in (0, 1):
        down.put(update(fragment, LAST))
    until(lambda: all(taker.newest() == {0: LAST, 1: LAST} for taker in takers), "all to come")
    down.close()
    assert all(taker.headers == takers[0].headers for taker in takers)


def test_a_host_that_takes_nothing_holds_the_others_back_at_a_few_fragments():
    down = Downlink(NewestFragments(), hosts=2)
    fast = streamed(down, 0)
    for version in range(1, MAX_AHEAD + 1):
        down.put(update(0, version))
        header = pb.DownHeader.FromString(next(fast))
        assert header.update.version == version
        left = header.size
        while left:
            left -= len(next(fast))
    down.put(update(0, MAX_AHEAD + 1))
    down.put(update(0, MAX_AHEAD + 2))
    slow = streamed(down, 1)
    assert pb.DownHeader.FromString(next(slow)).update.version == 1
    assert pb.DownHeader.FromString(next(fast)).update.version == MAX_AHEAD + 2


def test_a_host_gets_only_the_blocks_that_it_needs():
    down = Downlink(NewestFragments(), hosts=2)
    down.put(update(1, 7))
    needs = [
        [Cut(form.shape, ()) for form in FORMATS[0]],
        [Cut((700, 1000), (((0, 700), (0, 10)),)), Cut((0, 4), ())],
    ]
    stream = streamed(down, 0, needs)
    header = pb.DownHeader.FromString(next(stream))
    assert header.size == 700 * 10 * 4
    [block] = np.frombuffer(next(stream), F32).reshape(1, 700, 10)
    assert (block == 7).all()
