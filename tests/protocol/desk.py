"""A desk at which a test plays the driver of a `SyncerCore`: says what happened, and reads what follows."""

from __future__ import annotations

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore

TOKENS_PER_STEP = 10


class Desk:
    """A syncer core with its time; learners that step together unless told otherwise."""

    def __init__(
        self, total_steps: int | None = None, learners: int = 0, **policy: int | float | None
    ) -> None:
        self.policy = SyncPolicy(**policy)
        self.core = SyncerCore(self.policy, total_steps)
        self.now = 0.0
        for learner in range(learners):
            self.enter(learner)

    def tell(self, event: events.SyncerEvent, at: float | None = None) -> list[actions.SyncerAction]:
        self.now = self.now if at is None else at
        return self.core.handle(event, self.now)

    def enter(self, learner: int, incarnation: int = 1) -> None:
        welcome = only(events.Welcomed, self.tell(events.LearnerJoined(learner, incarnation)))
        self.tell(events.LearnerReady(learner, incarnation, welcome.step, welcome.versions))

    def report(
        self, learner: int, step: int, *, at: float | None = None, incarnation: int = 1, steps: int = 1
    ) -> list[actions.SyncerAction]:
        """A report of a learner that holds the newest versions and has taken `steps` steps on each."""
        counters = tuple(FragmentCounters(v, steps, steps * TOKENS_PER_STEP) for v in self.core.versions)
        return self.tell(events.StepReported(Report(learner, incarnation, step, counters)), at)

    def arrive(
        self, pull: actions.PullFragment, *, at: float | None = None, steps: int = 1
    ) -> list[actions.SyncerAction]:
        """The fragment that a pull asked for."""
        contribution = Contribution(
            pull.learner,
            pull.incarnation,
            pull.round.fragment,
            self.core.versions[pull.round.fragment],
            pull.round.step,
            steps,
            steps * TOKENS_PER_STEP,
        )
        return self.tell(events.FragmentArrived(pull.round, contribution), at)

    def merged(self, step: int, fragment: int, at: float | None = None) -> list[actions.SyncerAction]:
        return self.tell(events.MergeFinished(RoundId(step, fragment)), at)

    def complete(self, out: list[actions.SyncerAction]) -> list[actions.SyncerAction]:
        """Answers all pulls in `out` and ends the merges that follow, at once; returns all that follows."""
        after: list[actions.SyncerAction] = []
        waiting = list(out)
        while waiting:
            match waiting.pop(0):
                case actions.PullFragment() as pull:
                    found = self.arrive(pull)
                case actions.Merge(round=which):
                    found = self.merged(which.step, which.fragment)
                case _:
                    found = []
            after += found
            waiting += found
        return after


def pulled(out: list[actions.SyncerAction]) -> list[int]:
    """The learners that are pulled from."""
    return [action.learner for action in out if isinstance(action, actions.PullFragment)]


def pulls(out: list[actions.SyncerAction]) -> list[actions.PullFragment]:
    return [action for action in out if isinstance(action, actions.PullFragment)]


def only(kind: type, out: list) -> object:
    """The one action of that kind, or the one event of that kind that is told."""
    (found,) = (x for action in out for x in (action, getattr(action, "event", None)) if isinstance(x, kind))
    return found
