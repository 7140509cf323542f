"""Snapshots: under any order of deliveries the recorded states are of one cut, and no message is lost."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.clocks import VectorClock, is_consistent_cut
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.snapshot import Epoch, Mark, SnapshotCore

LEARNERS = (0, 1, 2)


@dataclasses.dataclass
class Process:
    """What one end holds: its clock, and the messages that it has sent and handled, by number."""

    clock: VectorClock = VectorClock()
    sent: set[int] = dataclasses.field(default_factory=set)
    got: set[int] = dataclasses.field(default_factory=set)

    def copy(self):
        return Process(self.clock, set(self.sent), set(self.got))


class Fleet:
    """A syncer and learners that send each other numbered messages, which arrive in any order."""

    def __init__(self):
        self.core = SnapshotCore(timeout=10.0)
        self.ends = {m: Epoch() for m in LEARNERS}
        self.syncer, self.learners = Process(), {m: Process() for m in LEARNERS}
        self.under_way = []  # (to the syncer?, learner, message or Mark, epoch, clock)
        self.cut, self.cuts, self.in_flight = None, {}, set()
        self.numbers = iter(range(10**6))

    def send(self, up, m):
        process = self.learners[m] if up else self.syncer
        if up:
            _, step = process.clock.learners.get(m, (1, 0))
            process.clock = process.clock.stepped(m, 1, step + 1)
            epoch = self.ends[m].stamp()
        else:
            process.clock = process.clock.merged(0, process.clock.version(0) + 1)
            epoch = self.core.stamp(m)
        number = next(self.numbers)
        process.sent.add(number)
        self.under_way.append((up, m, number, epoch, process.clock))

    def begin(self):
        if self.core.under_way:
            return
        self.cut, self.cuts, self.in_flight = self.syncer.copy(), {}, set()
        for mark in self.core.begin(self.core.epoch + 1, LEARNERS, 0.0, counted=True):
            self.under_way.append((False, mark.learner, mark, mark.number, None))

    def deliver(self, index):
        up, m, what, epoch, clock = self.under_way.pop(index % len(self.under_way))
        if not up:
            self.record_first(m, epoch)
        if isinstance(what, Mark):
            assert (self.core if up else self.ends[m]).marked(what)
            return
        flying = self.core.told(m, epoch) if up else self.ends[m].told(epoch)
        if flying:
            self.in_flight.add(what)
        process = self.syncer if up else self.learners[m]
        process.got.add(what)
        process.clock = process.clock.joined(clock)

    def record_first(self, m, epoch):
        if self.ends[m].sees(epoch):
            self.cuts[m] = self.learners[m].copy()
            self.under_way.append((True, m, self.ends[m].mark(m), epoch, None))

    @property
    def complete(self):
        return self.core.done and all(end.complete for end in self.ends.values())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("up"), st.sampled_from(LEARNERS)),
        st.tuples(st.just("down"), st.sampled_from(LEARNERS)),
        st.tuples(st.just("deliver"), st.integers(0, 50)),
        st.tuples(st.just("begin"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(ACTIONS, st.lists(st.integers(0, 50), min_size=1))
def test_each_message_is_in_a_state_or_in_a_channel_and_never_in_both(todo, order):
    fleet, checked = Fleet(), 0
    for what, number in [*todo, ("begin", 0)]:
        if what == "deliver" and fleet.under_way:
            fleet.deliver(number)
        elif what == "begin":
            fleet.begin()
        elif what in ("up", "down"):
            fleet.send(what == "up", number)
        if fleet.complete:
            check(fleet)
            fleet.core.end()
            checked += 1
    turn = 0
    while not fleet.complete and fleet.under_way:
        fleet.deliver(order[turn % len(order)])
        turn += 1
    if fleet.core.under_way:
        check(fleet)
        checked += 1
    assert checked


def check(fleet):
    assert fleet.complete
    assert fleet.core.recorded == LEARNERS
    assert set(fleet.cuts) == set(LEARNERS)
    cuts = [fleet.cut, *fleet.cuts.values()]
    sent, got = (set().union(*(getattr(cut, name) for cut in cuts)) for name in ("sent", "got"))
    assert got <= sent
    assert fleet.in_flight == sent - got
    assert is_consistent_cut(fleet.cut.clock, {m: cut.clock for m, cut in fleet.cuts.items()})


def begun(timeout=10.0):
    core = SnapshotCore(timeout)
    core.begin(1, LEARNERS, 0.0)
    return core


def test_on_a_channel_that_keeps_the_order_what_comes_before_the_mark_was_in_flight():
    core = begun()
    assert core.told(1)
    assert core.marked(Mark(1, 1))
    assert not core.told(1)
    assert core.told(2)


def test_a_learner_that_goes_before_its_mark_is_left_out():
    core = begun()
    core.gone(0)
    core.marked(Mark(1, 1))
    core.marked(Mark(1, 2))
    assert core.done
    assert (core.recorded, core.absent) == ((1, 2), (0,))
    assert not core.marked(Mark(1, 0))


def test_a_learner_that_goes_after_its_mark_is_in():
    core = begun()
    for m in LEARNERS:
        assert core.marked(Mark(1, m))
    core.gone(0)
    assert core.recorded == LEARNERS


def test_a_snapshot_that_takes_too_long_is_given_up_and_its_late_marks_mean_nothing():
    core = begun(timeout=10.0)
    assert core.next_deadline() == 10.0
    assert not core.expired(9.0)
    assert core.expired(10.0)
    core.end()
    assert core.next_deadline() is None
    assert not core.marked(Mark(1, 0))
    core.begin(2, LEARNERS, 20.0)
    assert not core.marked(Mark(1, 0))
    assert core.marked(Mark(2, 0))


def test_without_learners_a_snapshot_is_done_at_once():
    core = SnapshotCore(10.0)
    assert core.begin(1, (), 0.0) == []
    assert core.done


def test_one_is_taken_at_a_time_and_numbers_only_grow():
    core = begun()
    with pytest.raises(LocalProtocolError, match="under way"):
        core.begin(2, LEARNERS, 0.0)
    core.end()
    with pytest.raises(LocalProtocolError, match="after 1"):
        core.begin(1, LEARNERS, 0.0)


def test_a_number_that_was_seen_asks_for_no_second_recording():
    end = Epoch()
    assert end.sees(3)
    assert not end.sees(3)
    assert not end.sees(2)
