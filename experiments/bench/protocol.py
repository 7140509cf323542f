"""Events a second that a syncer's core handles, by learners M and fragments P, on one core.

Learners are a virtual fleet that steps at nearly one speed; only the time inside the syncer's core counts.
Seconds are of processor time, of the one thread that there is.
"""

from __future__ import annotations

import gc
import random
import time

from ddiloco.outer.encoding import Traffic
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.array_ports import CountingLearner, CountingSyncer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from experiments.bench.measuring import row

SIZES = ((16, 24), (128, 24), (2048, 24), (16, 200), (2048, 200))
EVENTS = 60_000
TOKENS = 8192


def run(quick: bool = False) -> list[dict]:
    """Measures each size; `quick`: a few thousand events, and no more than 128 learners.

    Returns:
      Rows in events a second. `reference` is 16 learners with as many fragments, `limit` a loop that only
      reads each counter of the reports.
    """
    sizes = [size for size in SIZES if not quick or size[0] <= 128]
    speeds = {size: _measure(*size, 3000 if quick else EVENTS) for size in sizes}
    return [
        row(f"protocol M={m} P={p}", speed, speeds[16, p][0], limit, "events/s", rounds=rounds)
        for (m, p), (speed, limit, rounds) in speeds.items()
    ]


class _Timed(SyncerCore):
    """Counts its events, and the seconds that it takes for them."""

    def __init__(self, policy: SyncPolicy) -> None:
        super().__init__(policy)
        self.forget()

    def forget(self) -> None:
        """Counts from now on."""
        self.seconds, self.events = 0.0, 0
        self.reports: list[Report] = []

    def handle(self, event: events.SyncerEvent, now: float) -> list[actions.SyncerAction]:
        begun = time.process_time()
        out = super().handle(event, now)
        self.next_deadline()  # which a driver asks for each time
        self.seconds += time.process_time() - begun
        self.events += 1
        if isinstance(event, events.StepReported):
            self.reports.append(event.report)
        return out


def _measure(learners: int, fragments: int, count: int) -> tuple[float, float, int]:
    """Events a second, those of the bare loop, and rounds that were merged."""
    policy = SyncPolicy(num_learners=learners, num_fragments=fragments, overlap=8, quorum=learners // 2)
    rng, sizes = random.Random(0), (0,) * fragments

    def place() -> VirtualPlace:
        links = (Link(LinkQuality(latency=0.1), rng) for _ in range(2))
        return VirtualPlace(lambda: 1.0 + 0.1 * rng.random(), *links)

    places, nothing = {m: place() for m in range(learners)}, CountingSyncer(Traffic(sizes, sizes, sizes))
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
    fleet.run(stop=lambda: core.events >= count)
    gc.unfreeze()
    begun = time.process_time()
    for report in core.reports:
        for counters in report.counters:
            _ = counters.version
    bare = (time.process_time() - begun) * core.events / max(1, len(core.reports))
    return core.events / core.seconds, core.events / max(bare, 1e-9), sum(core.versions) - merged
