"""A desk at which a test plays the driver of a `SyncerCore`: says what happened, and reads what follows."""

from __future__ import annotations

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import (
    NOTHING_MERGED,
    Contribution,
    FragmentCounters,
    Report,
    RoundId,
    Watermark,
)
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore

TOKENS_PER_STEP = 10


class Desk:
    """A syncer core with its time, what its learners owe it, and what it is merging."""

    def __init__(
        self, total_steps: int | None = None, learners: int = 0, **policy: int | float | None
    ) -> None:
        self.policy = SyncPolicy(**policy)
        self.core = SyncerCore(self.policy, total_steps)
        self.now = 0.0
        self.owed: dict[tuple[int, RoundId], tuple[int, events.OfferAsked]] = {}  # incarnation, question
        self.merging: list[RoundId] = []
        self.reports: dict[int, Report] = {}
        for learner in range(learners):
            self.enter(learner)

    def handle(self, event: events.SyncerEvent, at: float | None = None) -> list[actions.SyncerAction]:
        self.now = self.now if at is None else at
        out = self.core.handle(event, self.now)
        for learner, incarnation, asked in questions(out):
            self.owed[learner, asked.round] = (incarnation, asked)
        self.merging += [action.round for action in out if isinstance(action, actions.Merge)]
        return out

    def enter(self, learner: int, incarnation: int = 1) -> list[actions.SyncerAction]:
        welcome = only(events.Welcomed, self.handle(events.LearnerJoined(learner, incarnation)))
        return self.handle(events.LearnerReady(learner, incarnation, welcome.step, welcome.versions))

    def report(
        self, learner: int, step: int, *, at: float | None = None, incarnation: int = 1, steps: int = 1
    ) -> list[actions.SyncerAction]:
        """A report of a learner that holds the newest versions and has taken `steps` steps on each."""
        counters = tuple(FragmentCounters(v, steps, steps * TOKENS_PER_STEP) for v in self.core.versions)
        self.reports[learner] = Report(learner, incarnation, step, counters)
        return self.handle(events.StepReported(self.reports[learner]), at)

    def offer(
        self, learner: int, due: tuple[int, int], *, at: float | None = None, incarnation: int = 1
    ) -> list[actions.SyncerAction]:
        """What a learner last reported arrives, for the round that was due at (step, fragment)."""
        report, which = self.reports[learner], RoundId(*due)
        self.owed.pop((learner, which), None)
        known = report.counters[which.fragment]
        work = known.version, report.step, known.steps, known.tokens
        since = self.core.state().watermarks[which.fragment].get(learner, NOTHING_MERGED)
        upto = Watermark(0, report.step)  # all are of one life
        contribution = Contribution(learner, incarnation, which.fragment, *work, since=since.bare, upto=upto)
        return self.handle(events.FragmentArrived(which, contribution), at)

    def fail(self, learner: int, due: tuple[int, int]) -> list[actions.SyncerAction]:
        """An offer breaks on its way."""
        return self.handle(events.OfferFailed(RoundId(*due), learner, 1, "connection closed"))

    def merged(self, step: int, fragment: int, at: float | None = None) -> list[actions.SyncerAction]:
        which = RoundId(step, fragment)
        self.merging = [other for other in self.merging if other != which]
        return self.handle(events.MergeFinished(which), at)

    def settle(self) -> list[actions.SyncerAction]:
        """All due offers arrive, and merges that follow end, at once; returns all that follows."""
        after: list[actions.SyncerAction] = []
        while self.merging or (due := [key for key in self.owed if self._is_due(*key)]):
            if self.merging:
                after += self.merged(self.merging[0].step, self.merging[0].fragment)
                continue
            for learner, which in due:
                incarnation = self.reports[learner].incarnation
                after += self.offer(learner, (which.step, which.fragment), incarnation=incarnation)
        return after

    def _is_due(self, learner: int, which: RoundId) -> bool:
        report, (incarnation, asked) = self.reports.get(learner), self.owed[learner, which]
        if report is None or report.incarnation != incarnation or report.step < asked.clock:
            return False
        known = report.counters[which.fragment]
        return known.version == asked.version and known.steps > 0


def questions(out: list[actions.SyncerAction]) -> list[tuple[int, int, events.OfferAsked]]:
    """Who is asked for what: learner, incarnation, question."""
    told = [a for a in out if isinstance(a, actions.Send) and isinstance(a.event, events.OfferAsked)]
    return [(*who, action.event) for action in told for who in action.receivers]


def asked(out: list[actions.SyncerAction]) -> list[tuple[int, int, int]]:
    """Who is asked for what: learner, and the round's step and fragment."""
    return [(who, q.round.step, q.round.fragment) for who, _, q in questions(out)]


def clocks(out: list[actions.SyncerAction]) -> dict[int, int]:
    """By learner, the clock that it is asked for."""
    return {who: q.clock for who, _, q in questions(out)}


def merges(out: list[actions.SyncerAction]) -> list[tuple[int, int, list[int]]]:
    """What is merged: the round's step and fragment, and whose offers."""
    found = [action for action in out if isinstance(action, actions.Merge)]
    return [(m.round.step, m.round.fragment, [c.learner for c in m.contributions]) for m in found]


def only(kind: type, out: list) -> object:
    """The one action of that kind, or the one event of that kind that is told."""
    (found,) = (x for action in out for x in (action, getattr(action, "event", None)) if isinstance(x, kind))
    return found


def records(out, name):
    """The values of the records of this name among these actions."""
    return [action.values for action in out if isinstance(action, actions.Record) and action.name == name]
