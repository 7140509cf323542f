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
from experiments.bench.measuring import resident_bytes, row

SIZES = ((16, 24), (128, 24), (1024, 24), (4096, 24), (16384, 24), (16, 200), (2048, 200))
ROUNDS = 6
"""That are measured, of all learners each."""
MIN_EVENTS = 60_000
TOKENS = 8192


def run(quick: bool = False) -> list[dict]:
    """Measures each size; `quick`: a few thousand events, and no more than 128 learners.

    Returns:
      Rows in events a second. `reference` is 16 learners with as many fragments, `limit` a loop that only
      reads each counter of the reports. With `rounds`, of which each is an interval's H-th part of all
      learners' steps, `seconds_a_round` of the core, `joins_seconds` for all joins, and `resident_mb` of this
      process, learners included.
    """
    sizes = [size for size in SIZES if not quick or size[0] <= 128]
    found = {size: _measure(*size, 3000 if quick else MIN_EVENTS) for size in sizes}
    return [
        row(f"protocol M={m} P={p}", speed, found[16, p][0], limit, "events/s", **more)
        for (m, p), (speed, limit, more) in found.items()
    ]


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
