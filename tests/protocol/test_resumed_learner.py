"""A learner that comes back with what a snapshot has of it: its counters, and what it had offered."""

import dataclasses

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.clocks import VectorClock
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, FragmentCounters, Given, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.protocol.work import FragmentWork

POLICY = SyncPolicy(num_learners=2, num_fragments=2, interval=4)
HELD = [FragmentWork(3, 12, 2, 20), FragmentWork(2, 10, 4, 40, lineage=9, offered={12: (2, 20)})]


def resumed(policy=POLICY, total_steps=None, clock=14, held=HELD):
    core = LearnerCore(0, 7, policy, total_steps)
    return core, core.resume(clock, held)


def test_it_joins_as_a_returner_with_its_versions_and_tells_its_counters():
    core, out = resumed()
    assert out[0] == actions.TellSyncer(events.LearnerJoined(0, 7, 14, (3, 2), (0, 9)))
    report = Report(0, 7, 14, (FragmentCounters(3, 2, 20), FragmentCounters(2, 4, 40)))
    assert out[-1] == actions.TellSyncer(events.StepReported(report))
    assert (core.clock, core.versions) == (14, (3, 2))


def test_what_it_is_asked_for_it_offers_with_the_same_counters():
    core, _ = resumed()
    contribution = Contribution(0, 7, 1, 2, 14, 4, 40, lineage=9)
    which = RoundId(14, 1)
    out = core.handle(events.OfferAsked(which, 2, 14), 0.0)
    assert out == [actions.MakeOffer(contribution), actions.SendOffer(which, contribution)]


def test_an_offer_of_the_process_before_is_no_ground_to_rebase_on():
    """Its copy was with that process."""
    core, _ = resumed(dataclasses.replace(POLICY, rebase=True))
    out = core.handle(events.UpdateArrived(1, 3, 14, (Given(0, 12),)), 0.0)
    assert out == [actions.ApplyUpdate(1, 3, 0.0)]


def test_its_counters_go_on_from_what_they_were():
    core, _ = resumed()
    core.handle(events.StepStarted(10), 0.0)
    assert [(f.steps, f.tokens) for f in core.fragments] == [(3, 30), (5, 50)]


def test_a_learner_that_was_blocked_is_so_until_the_update_comes():
    policy = SyncPolicy(num_learners=2, num_fragments=1, interval=4, overlap=0, quorum=None, max_run_ahead=0)
    core, _ = resumed(policy, clock=4, held=[FragmentWork(0, 0, 4, 40)])
    core.handle(events.UpdateArrived(0, 1, 4), 0.0)
    assert not core.blocked


def test_the_state_that_it_gives_is_a_copy():
    core, _ = resumed()
    before = core.fragments
    core.handle(events.StepStarted(10), 0.0)
    assert before[0].steps == 2


def test_a_syncer_that_starts_from_the_same_snapshot_lets_it_in_and_merges_what_it_held():
    learner, out = resumed(total_steps=20)
    syncer = SyncerCore(POLICY, 20, SyncerState((3, 2), (12, 10), ((0, 6),), (0, 9)))
    told = [told for said in out for told in syncer.handle(said.event, 0.0)]
    assert syncer.vector_clock == VectorClock({0: (7, 14)}, {0: 3, 1: 2})
    asked = [a.event for a in told if isinstance(a, actions.Tell) and a.event.round == RoundId(14, 1)]
    made, sent = learner.handle(asked[0], 0.0)
    merges = syncer.handle(events.FragmentArrived(sent.round, sent.contribution), 0.0)
    [merge] = [action for action in merges if isinstance(action, actions.Merge)]
    assert merge.contributions == (made.contribution,)
    assert merge.round == RoundId(14, 1)


@pytest.mark.parametrize("held", [[], HELD[:1]])
def test_a_state_of_another_number_of_fragments_is_refused(held):
    with pytest.raises(LocalProtocolError, match="cannot be taken up"):
        LearnerCore(0, 7, POLICY).resume(14, held)


def test_only_a_core_that_has_not_begun_takes_a_state_up():
    core, _ = resumed()
    with pytest.raises(LocalProtocolError):
        core.resume(14, HELD)
