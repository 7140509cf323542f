"""A cut of a syncer of several processes: the authority begins it, and it is one cut of all of them."""

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.snapshot import Epoch, Mark, SnapshotCore

AUTHORITY, PARTS, LEARNERS = "authority", ("part 0", "part 1"), (0, 1)
EVERYONE = (AUTHORITY, *PARTS, *LEARNERS)
CHANNELS = [
    *((AUTHORITY, part) for part in PARTS),
    *((part, AUTHORITY) for part in PARTS),
    *((learner, to) for learner in LEARNERS for to in (AUTHORITY, *PARTS)),
    *((of, learner) for of in (AUTHORITY, *PARTS) for learner in LEARNERS),
]


@dataclasses.dataclass
class Process:
    """One process with what it has sent and got, and its end of the protocol of cuts."""

    sent: set[int] = dataclasses.field(default_factory=set)
    got: set[int] = dataclasses.field(default_factory=set)
    in_flight: set[int] = dataclasses.field(default_factory=set)
    recorded: tuple[frozenset[int], frozenset[int]] | None = None
    epoch: Epoch = dataclasses.field(default_factory=Epoch)
    core: SnapshotCore = dataclasses.field(default_factory=lambda: SnapshotCore(10.0))


class Fleet:
    """Channels to learners keep no order: what they carry bears the sender's epoch. All others keep it."""

    def __init__(self):
        self.all = {name: Process() for name in EVERYONE}
        self.channels = {channel: collections.deque() for channel in CHANNELS}
        self.numbers = iter(range(10**6))

    def send(self, of, to):
        number = next(self.numbers)
        self.all[of].sent.add(number)
        self.channels[of, to].append((number, self.all[of].epoch.number))

    def record(self, name, epoch):
        """As a process is told of a cut for the first time: its state is now, its marks follow."""
        process = self.all[name]
        if not process.epoch.sees(epoch):
            return
        process.recorded = (frozenset(process.sent), frozenset(process.got))
        if name not in LEARNERS:
            before = [of for of, to in CHANNELS if to == name]
            process.core.begin(epoch, [EVERYONE.index(of) for of in before], 0.0)
        for of, to in CHANNELS:
            if of == name:
                self.channels[of, to].append((Mark(epoch, EVERYONE.index(name)), epoch))

    def deliver(self, channel, place):
        of, to = channel
        if not self.channels[channel]:
            return
        if to not in LEARNERS:
            place = 0
        self.channels[channel].rotate(-place)
        what, epoch = self.channels[channel].popleft()
        self.channels[channel].rotate(place)
        process = self.all[to]
        if isinstance(what, Mark) or to in LEARNERS:
            self.record(to, epoch)
        if isinstance(what, Mark):
            process.core.marked(what)
            return
        if process.core.awaits(EVERYONE.index(of)):
            process.in_flight.add(what)
        process.got.add(what)

    @property
    def complete(self):
        recorded = all(process.recorded is not None for process in self.all.values())
        return recorded and all(self.all[name].core.done for name in (AUTHORITY, *PARTS))


CHOICES = st.tuples(st.sampled_from(["send", "deliver"]), st.sampled_from(CHANNELS), st.integers(0, 5))


@settings(max_examples=200)
@given(st.lists(CHOICES, max_size=80), st.lists(CHOICES, max_size=80))
def test_what_one_state_has_got_another_has_sent_and_the_rest_was_in_flight(before, after):
    fleet = Fleet()

    def go(what, channel, place):
        fleet.send(*channel) if what == "send" else fleet.deliver(channel, place)

    for choice in before:
        go(*choice)
    fleet.record(AUTHORITY, 1)
    for choice in after:
        go(*choice)
    while not fleet.complete:
        for channel in CHANNELS:
            fleet.deliver(channel, 0)
    sent = frozenset().union(*(process.recorded[0] for process in fleet.all.values()))
    got = frozenset().union(*(process.recorded[1] for process in fleet.all.values()))
    assert got <= sent
    for learner in LEARNERS:  # what was on its way to them bears an epoch before the cut, and is sent again
        assert fleet.all[learner].recorded[1] <= sent
    to_syncer = {n for name in (AUTHORITY, *PARTS) for n in fleet.all[name].in_flight}
    to_learners = {
        n for n in sent - got if any(n in fleet.all[learner].got for learner in LEARNERS)
    } - to_syncer
    on_the_way = {n for channel in fleet.channels.values() for n, _ in channel if not isinstance(n, Mark)}
    assert sent - got <= to_syncer | to_learners | on_the_way, "nothing that was sent is lost"
    assert to_syncer <= sent - got
