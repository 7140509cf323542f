"""How many events a second a syncer's core takes, by learners M and fragments P, on one core.

Learners are cores of their own, in virtual time, and step at nearly the same speed; only the time inside the
syncer's core counts. Seconds are of processor time, of the one thread that there is.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Report
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.virtual.calendar import Alarm, Calendar
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


class _Timed:
    """A syncer, its learners and how long the syncer took."""

    def __init__(self, learners: int, fragments: int) -> None:
        policy = SyncPolicy(num_learners=learners, num_fragments=fragments, overlap=8, quorum=learners // 2)
        self.calendar = Calendar()
        self.core = SyncerCore(policy)
        self.learners = [LearnerCore(m, 1, policy) for m in range(learners)]
        self._alarm = Alarm(self.calendar, lambda: self._tell(events.Timeout()))
        self.seconds, self.events = 0.0, 0
        self.reports: list[Report] = []
        self._rng = random.Random(0)
        for m in range(learners):
            self._tell(events.LearnerJoined(m, 1))
            self.calendar.after(self._rng.random(), self._step, m)

    def _tell(self, event: events.SyncerEvent) -> None:
        begun = time.process_time()
        out = self.core.handle(event, self.calendar.now)
        deadline = self.core.next_deadline()
        self.seconds += time.process_time() - begun
        self.events += 1
        self._alarm.set(deadline)
        for action in out:
            match action:
                case actions.Tell(receivers, told):
                    for m, _ in receivers:
                        self._obey(m, self.learners[m].handle(told, self.calendar.now))
                case actions.Merge(which):
                    self.calendar.after(0.1, self._tell, events.MergeFinished(which))

    def _obey(self, m: int, out: list[actions.LearnerAction]) -> None:
        for action in out:
            match action:
                case actions.AdoptAll(step, versions):
                    self._tell(events.LearnerReady(m, 1, step, versions))
                case actions.TellSyncer(events.StepReported(report) as told):
                    self.reports.append(report)
                    self._tell(told)
                case actions.SendOffer(which, contribution):
                    self.calendar.after(0.2, self._tell, events.FragmentArrived(which, contribution))

    def _step(self, m: int) -> None:
        now, learner = self.calendar.now, self.learners[m]
        self._obey(m, learner.handle(events.StepStarted(TOKENS), now))
        self._obey(m, learner.handle(events.StepFinished(), now))
        self.calendar.after(1.0 + 0.1 * self._rng.random(), self._step, m)


def _measure(learners: int, fragments: int, count: int) -> tuple[float, float, int]:
    """Events a second, those of the bare loop, and rounds that were merged."""
    timed = _Timed(learners, fragments)
    while timed.core.step < 4:  # estimates have begun, and rounds follow one another
        timed.calendar.advance()
    gc.collect()
    gc.freeze()  # thousands of learners are elsewhere: their objects are not the syncer's to collect
    timed.seconds, timed.events, merged = 0.0, 0, sum(timed.core.versions)
    timed.reports.clear()
    while timed.events < count:
        timed.calendar.advance()
    gc.unfreeze()
    begun = time.process_time()
    for _ in _counters(timed.reports):
        pass
    bare = (time.process_time() - begun) * timed.events / max(1, len(timed.reports))
    return timed.events / timed.seconds, timed.events / max(bare, 1e-9), sum(timed.core.versions) - merged


def _counters(reports: list[Report]) -> Iterator[int]:
    for report in reports:
        for counters in report.counters:
            yield counters.version
