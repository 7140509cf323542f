"""What of each learner's work is merged, over a run and in every window of it."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ddiloco.protocol import actions, events
from ddiloco.virtual.array_ports import Observer
from ddiloco.virtual.learner_process import VirtualLearner


class Shares(Observer):
    """Counts learners' steps, and for each the fragments in whose merges it is; a share is of all of these.

    For fleets in which every learner has one process, from the start to the end.
    """

    def __init__(self, fragments: int) -> None:
        self.steps: collections.Counter[int] = collections.Counter()  # by learner
        self.behind: list[int] = []  # steps that a learner had taken since what was merged of it
        self._fragments = fragments
        self._covered: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)

    def learner_handled(
        self,
        learner: VirtualLearner,
        event: events.LearnerEvent,
        out: list[actions.LearnerAction],
        now: float,
    ) -> None:
        """Counts steps."""
        self.steps[learner.number] += isinstance(event, events.StepStarted)

    def merged(self, merge: actions.Merge, left_out: Sequence[int], now: float) -> None:
        """Counts the steps that are in a merge."""
        for c in merge.contributions:
            last = c.upto.steps
            self.behind.append(self.steps[c.learner] - last)
            self._covered[c.learner].update(range(last - c.steps, last))

    def share(self, *learners: int) -> float:
        """Of these learners' steps; of all, if none is named."""
        learners = learners or tuple(self.steps)
        merged = sum(self._covered[m].total() for m in learners)
        return merged / sum(self.steps[m] * self._fragments for m in learners)

    def in_windows(self, learner: int, length: int) -> list[float]:
        """The share of each `length` of its steps, without the last of them, which may be on their way."""
        covered, last = self._covered[learner], self.steps[learner] - 2 * length
        windows = [range(first, first + length) for first in range(0, max(0, last) + 1, length)]
        return [sum(covered[step] for step in window) / (length * self._fragments) for window in windows]
