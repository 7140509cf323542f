"""How many events and reports a second a syncer takes, by learners M and fragments P, on one core.

Learners are a virtual fleet that steps at nearly one speed; only the time inside the syncer's core counts.
Seconds are of processor time, of the one thread that there is.
"""

from __future__ import annotations

import gc
import random
import time

from ddiloco.outer.encoding import Traffic
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import FragmentCounters, Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import from_learner, learner_event
from ddiloco.remote.wire.validation import parse
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from experiments.bench.measuring import resident_bytes, row

SIZES = ((16, 24), (128, 24), (1024, 24), (4096, 24), (16384, 24), (16, 200), (2048, 200))
ROUNDS = 6
"""That are measured, of all learners each."""
MIN_EVENTS = 60_000
TOKENS = 8192
REPORTS_OF = (24, 600)
"""Fragments of the learners whose reports are measured."""
REPORTING = 64


def run(quick: bool = False) -> list[dict]:
    """Measures each size; `quick`: a few thousand events, and no more than 128 learners.

    Returns:
      Rows in events a second. `reference` is 16 learners with as many fragments, `limit` a loop that only
      reads each counter of the reports. With `rounds`, of which each is an interval's H-th part of all
      learners' steps, `seconds_a_round` of the core, `joins_seconds` for all joins, and `resident_mb` of this
      process, learners included. Then rows of reports from bytes to the core's actions, in each of which one
      fragment of P has a new version: `reference` with 24 fragments, `limit` protobuf's parsing alone.
    """
    sizes = [size for size in SIZES if not quick or size[0] <= 128]
    found = {size: _measure(*size, 3000 if quick else MIN_EVENTS) for size in sizes}
    reports = {p: _reports(p, 4 if quick else 40) for p in REPORTS_OF}
    return [
        row(f"protocol M={m} P={p}", speed, found[16, p][0], limit, "events/s", **more)
        for (m, p), (speed, limit, more) in found.items()
    ] + [
        row(f"report P={p}", speed, reports[REPORTS_OF[0]][0], limit, "reports/s")
        for p, (speed, limit) in reports.items()
    ]


def _reports(fragments: int, steps: int) -> tuple[float, float]:
    """Reports a second of one core, of learners that apply an update at each step, and those only parsed."""
    policy = SyncPolicy(num_learners=REPORTING, num_fragments=fragments, interval=fragments, quorum=1)
    core, spent, parsed, taken = SyncerCore(policy), 0.0, 0.0, 0
    bases = (FragmentCounters(0, 0, 0),) * fragments
    last = [Report(m, 1, 0, bases, True) for m in range(REPORTING)]
    came: list[Report | None] = [None] * REPORTING
    for m in range(REPORTING):
        core.handle(events.LearnerJoined(m, 1), 0.0)
    for step in range(steps):
        sent = []
        for m, before in enumerate(last):
            fresh = FragmentCounters(0, -step, -step * TOKENS)
            bases = tuple(fresh if p == step % fragments else base for p, base in enumerate(before.bases))
            last[m] = Report(m, 1, step, bases, True, (0,), step, step * TOKENS)
            known = before if step else None
            sent.append(from_learner(events.StepReported(last[m]), known).SerializeToString())
        begun = time.process_time()
        for data in sent:
            pb.FromLearner.FromString(data)
        between = time.process_time()
        for m, data in enumerate(sent):
            event = learner_event(parse(pb.FromLearner, data), m, fragments, came[m])
            came[m] = event.report
            core.handle(event, step + m / REPORTING)
            core.next_deadline()
        if step > 1:  # the first ones have all fragments
            spent += time.process_time() - between
            parsed += between - begun
            taken += REPORTING
    assert all(m.step == steps - 1 for m in core._members.live()), "a report was refused"
    return taken / spent, taken / max(parsed, 1e-9)


class _Timed(SyncerCore):
    """Counts its events, and the seconds that it takes for them."""

    def __init__(self, policy: SyncPolicy) -> None:
        super().__init__(policy)
        self.joining = 0.0
        self.forget()

    def forget(self) -> None:
        """Counts from now on."""
        self.seconds, self.events = 0.0, 0
        self.reports: list[Report] = []

    def handle(self, event: events.SyncerEvent, now: float) -> list[actions.SyncerAction]:
        begun = time.process_time()
        out = super().handle(event, now)
        self.next_deadline()  # which a driver asks for each time
        seconds = time.process_time() - begun
        self.seconds += seconds
        self.joining += seconds if isinstance(event, events.LearnerJoined | events.LearnerReady) else 0.0
        self.events += 1
        if isinstance(event, events.StepReported):
            self.reports.append(event.report)
        return out


def _measure(learners: int, fragments: int, count: int) -> tuple[float, float, dict[str, float]]:
    """Events a second, those of the bare loop, and further figures."""
    policy = SyncPolicy(num_learners=learners, num_fragments=fragments, overlap=8, quorum=learners // 2)
    rng, sizes = random.Random(0), (0,) * fragments

    def place() -> VirtualPlace:
        links = (Link(LinkQuality(latency=0.1), rng) for _ in range(2))
        return VirtualPlace(lambda: 1.0 + 0.1 * rng.random(), *links)

    places, nothing = {m: place() for m in range(learners)}, CountingSyncer(Traffic(sizes, (sizes,), sizes))
    fleet = Fleet(
        policy, None, places, lambda m: CountingLearner(lambda: TOKENS), nothing, takes=Durations(lambda: 0.1)
    )
    fleet.schedule(Change(rng.random(), m, "join") for m in range(learners))
    core = fleet.syncer._actor.core = _Timed(policy)
    fleet.run(stop=lambda: core.step >= 4)  # estimates have begun, and rounds follow one another
    gc.collect()
    gc.freeze()  # thousands of learners are elsewhere: their objects are not the syncer's to collect
    core.forget()
    merged = sum(core.versions)
    fleet.run(stop=lambda: core.events >= count and sum(core.versions) >= merged + ROUNDS)
    gc.unfreeze()
    begun = time.process_time()
    for report in core.reports:
        for base in report.bases:
            _ = base.version
    bare = (time.process_time() - begun) * core.events / max(1, len(core.reports))
    rounds = sum(core.versions) - merged
    more = {"rounds": rounds, "seconds_a_round": core.seconds / rounds, "joins_seconds": core.joining}
    more["resident_mb"] = resident_bytes("VmRSS") / 1e6
    return core.events / core.seconds, core.events / max(bare, 1e-9), more
