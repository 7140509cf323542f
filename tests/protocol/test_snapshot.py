"""Snapshots: under any order of deliveries the recorded states are of one cut, and no message is lost."""

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.clocks import VectorClock, is_consistent_cut
from ddiloco.protocol.snapshot import Epoch
from tests.long import times

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
    """A syncer and learners that send each other numbered messages: up in order, down in any order."""

    def __init__(self):
        self.epoch, self.awaited = 0, None  # learners whose mark has yet to come; None: none is under way
        self.ends = {m: Epoch() for m in LEARNERS}
        self.syncer, self.learners = Process(), {m: Process() for m in LEARNERS}
        self.up = {m: collections.deque() for m in LEARNERS}  # (message or None for a mark, clock)
        self.down = []  # (learner, message or None for a mark, epoch, clock)
        self.cut, self.cuts, self.in_flight = None, {}, set()
        self.numbers = iter(range(10**6))

    def send(self, up, m):
        process, number = self.learners[m] if up else self.syncer, next(self.numbers)
        if up:
            _, step = process.clock.learners.get(m, (1, 0))
            process.clock = process.clock.joined(VectorClock({m: (1, step + 1)}))
            self.up[m].append((number, process.clock))
        else:
            process.clock = process.clock.merged(0, process.clock.version(0) + 1)
            self.down.append((m, number, self.epoch, process.clock))
        process.sent.add(number)

    def begin(self):
        if self.awaited is not None:
            return
        self.epoch, self.awaited = self.epoch + 1, {*LEARNERS}
        self.cut, self.cuts, self.in_flight = self.syncer.copy(), {}, set()
        self.down += [(m, None, self.epoch, None) for m in LEARNERS]

    @property
    def under_way(self):
        return [m for m in LEARNERS if self.up[m]] + [*range(len(LEARNERS), len(LEARNERS) + len(self.down))]

    def deliver(self, index):
        chosen = self.under_way[index % len(self.under_way)]
        if chosen in LEARNERS:
            self.arrive_up(chosen, *self.up[chosen].popleft())
        else:
            self.arrive_down(*self.down.pop(chosen - len(LEARNERS)))

    def arrive_up(self, m, what, clock):
        if what is None:
            self.awaited.remove(m)
            return
        if self.awaited and m in self.awaited:
            self.in_flight.add(what)
        self.syncer.got.add(what)
        self.syncer.clock = self.syncer.clock.joined(clock)

    def arrive_down(self, m, what, epoch, clock):
        if self.ends[m].sees(epoch):
            self.cuts[m] = self.learners[m].copy()
            self.up[m].append((None, None))
        if what is not None:
            self.learners[m].got.add(what)
            self.learners[m].clock = self.learners[m].clock.joined(clock)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("up"), st.sampled_from(LEARNERS)),
        st.tuples(st.just("down"), st.sampled_from(LEARNERS)),
        st.tuples(st.just("deliver"), st.integers(0, 50)),
        st.tuples(st.just("begin"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=times(100, 300))
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
        if fleet.awaited == set():
            check(fleet)
            fleet.awaited = None
            checked += 1
    turn = 0
    while fleet.awaited:
        fleet.deliver(order[turn % len(order)])
        turn += 1
    if fleet.awaited is not None:
        check(fleet)
        checked += 1
    assert checked


def check(fleet):
    assert set(fleet.cuts) == set(LEARNERS)
    sent, got = (set().union(*(getattr(c, name) for c in fleet.cuts.values())) for name in ("sent", "got"))
    assert got <= fleet.cut.sent
    assert fleet.cut.got <= sent
    assert fleet.in_flight == sent - fleet.cut.got
    assert is_consistent_cut(fleet.cut.clock, {m: cut.clock for m, cut in fleet.cuts.items()})


def test_a_learner_records_its_state_once_for_each_snapshot():
    end = Epoch()
    assert [number for number in (0, 1, 1, 2, 1, 4, 3) if end.sees(number)] == [1, 2, 4]
