"""What an event costs the syncer's core, in calls: with many learners no more than with few."""

import collections
import sys

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore

FEW, MANY = 20, 160
STEPS = 12


class CountedCore(SyncerCore):
    """Counts the calls of Python and C functions, and the values of generators, by kind of event."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls, self.taken = collections.Counter(), collections.Counter()

    def handle(self, event, now):
        kind, count = type(event), 0

        def counted(*_):
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            out = super().handle(event, now)
            self.next_deadline()
        finally:
            sys.setprofile(None)
        self.calls[kind] += count
        self.taken[kind] += 1
        return out


def costs(learners, total_steps=None, fragments=4, **policy):
    """Calls an event, by its kind, of a fleet that joins, steps in turn, offers and merges."""
    settings = {"quorum": learners // 2, "interval": 4, "overlap": 2} | policy
    policy = SyncPolicy(num_learners=learners, num_fragments=fragments, **settings)
    syncer = CountedCore(policy, total_steps)
    cores = [LearnerCore(m, 1, policy, total_steps) for m in range(learners)]
    todo, now = collections.deque(), 0.0

    def perform(decided):
        for action in decided:
            if isinstance(action, actions.Send):
                todo.extend((m, action.to(m)) for m, _ in action.receivers)
            elif isinstance(action, actions.Merge):
                perform(syncer.handle(events.MergeFinished(action.round), now))

    def tell(learner, event):
        todo.append((learner, event))
        while todo:
            m, event = todo.popleft()
            for action in cores[m].handle(event, now):
                if isinstance(action, actions.SendToSyncer):
                    perform(syncer.handle(action.event, now))
                elif isinstance(action, actions.SendOffer):
                    offer = events.FragmentArrived(action.round, action.contribution)
                    perform(syncer.handle(offer, now))

    for m in range(learners):
        tell(m, events.Heartbeat())
    for step in range(STEPS):
        for m, core in enumerate(cores):
            now = step + m / learners
            if not core.blocked and not core.done:
                tell(m, events.StepStarted(10))
                tell(m, events.StepFinished())
    assert min(syncer.versions) >= 1
    return {kind: syncer.calls[kind] / syncer.taken[kind] for kind in syncer.taken}


@pytest.mark.parametrize("policy", [{}, {"rebase": True, "max_run_ahead": None}], ids=["waits", "rebases"])
def test_no_event_costs_more_with_many_learners(policy):
    few, many = costs(FEW, **policy), costs(MANY, **policy)
    for kind in (events.LearnerJoined, events.LearnerReady, events.StepReported, events.FragmentArrived):
        assert many[kind] < 1.6 * few[kind], kind.__name__


def test_a_report_costs_no_more_with_many_fragments():
    few, many = (costs(FEW, fragments=p, interval=p) for p in (6, 12))
    assert many[events.StepReported] < 1.6 * few[events.StepReported]
