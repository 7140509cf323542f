"""A learner that goes on from a checkpoint: its counters, what it had offered, and what was merged of it."""

import dataclasses

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import (
    NOTHING_MERGED,
    Contribution,
    FragmentCounters,
    Report,
    RoundId,
    Watermark,
)
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.protocol.work import FragmentWork, LearnerWork

POLICY = SyncPolicy(num_learners=2, num_fragments=2, interval=4)
MARKS = Watermark(5, 12), Watermark(3, 10)
HELD = (
    FragmentWork(3, 12, 2, 20, watermark=MARKS[0]),
    FragmentWork(2, 10, 4, 40, lineage=9, watermark=MARKS[1], offered={12: (2, 20)}),
)
REBASE = dataclasses.replace(POLICY, rebase=True)


def resumed(policy=POLICY, total_steps=None, clock=14, held=HELD, began=NOTHING_MERGED):
    """Learner 0 from a checkpoint of its life 5, made after 14 steps; life 3 before it was left after 11."""
    core = LearnerCore(0, 7, policy, total_steps)
    return core, core.resume(LearnerWork(clock, 5, 14, held, {3: 11}), began)


def test_it_joins_as_a_returner_with_its_versions_and_tells_its_counters():
    core, out = resumed()
    left = Watermark(3, 11), Watermark(5, 14)
    joined = events.LearnerJoined(0, 7, 14, (3, 2), (0, 9), 7, Watermark(5, 14), left=left)
    assert out[0] == actions.SendToSyncer(joined)
    report = Report(0, 7, 14, (FragmentCounters(3, 2, 20), FragmentCounters(2, 4, 40)))
    assert out[-1] == actions.SendToSyncer(events.StepReported(report))
    assert (core.clock, core.versions) == (14, (3, 2))


def test_what_it_is_asked_for_it_offers_with_the_same_counters():
    core, _ = resumed()
    contribution = Contribution(0, 7, 1, 2, 14, 4, 40, 9, MARKS[1], Watermark(7, 14))
    which = RoundId(14, 1)
    out = core.handle(events.OfferAsked(which, 2, 14), 0.0)
    assert out == [actions.MakeOffer(contribution), actions.SendOffer(which, contribution)]


@pytest.mark.parametrize(
    ("mark", "merged"),
    [
        (Watermark(5, 12), 12),  # of the life that the checkpoint is of
        (Watermark(7, 12), 12),  # of its own
        (Watermark(5, 13), None),  # an offer whose copy is not in the checkpoint
        (Watermark(5, 20), None),  # made after the checkpoint, by the process that is lost
        (Watermark(3, 12), None),  # of an older life, beyond where that was left
        (Watermark(6, 12), None),  # of a life that it does not know
        (MARKS[1], None),  # as before: nothing more
    ],
)
def test_of_an_update_it_knows_what_is_merged_of_its_checkpoint(mark, merged):
    core, _ = resumed(REBASE)
    out = core.handle(events.UpdateArrived(1, 3, 14, mark), 0.0)
    keeps = merged is not None or mark == MARKS[1]
    assert out == [actions.ApplyUpdate(1, 3, 0.0, merged, keeps)]
    assert core.work.fragments[1].steps == (2 if merged else 4 if keeps else 0)
    assert core.work.fragments[1].watermark == mark


def test_work_that_was_merged_beyond_the_checkpoint_counts_up_to_that_at_most():
    """The process that is lost had gone on from there; what this one does since is its own."""
    held = (HELD[0], dataclasses.replace(HELD[1], offered={14: (4, 40)}))
    core, _ = resumed(REBASE, held=held)
    core.handle(events.StepStarted(10), 0.0)
    out = core.handle(events.UpdateArrived(1, 3, 14, Watermark(5, 20)), 0.0)
    assert out == [actions.ApplyUpdate(1, 3, 0.0, 14, True)]
    assert (core.work.fragments[1].steps, core.work.fragments[1].tokens) == (1, 10)


@pytest.mark.parametrize(
    ("merged", "began", "joins"),
    [
        ((5, 20), NOTHING_MERGED, False),
        ((5, 20), Watermark(5, 20), True),
        ((3, 11), NOTHING_MERGED, True),
        ((3, 12), NOTHING_MERGED, False),  # the older process has gone on
        ((4, 15), NOTHING_MERGED, False),  # of a process that began at the same time
    ],
)
def test_it_takes_part_only_if_its_data_go_on_after_all_that_are_merged(merged, began, joins):
    """Else it would draw again what another process had drawn, and given."""
    first = {0: Watermark(*merged, "there")}
    state = SyncerState((3, 2), (12, 10), ((0, 6),), (0, 9), (first, {0: MARKS[1]}))
    syncer = SyncerCore(POLICY, 20, state)
    learner, out = resumed(total_steps=20, began=began)
    told = syncer.handle(out[0].event, 0.0)
    assert (syncer.live == (0,)) is joins
    if not joins:
        [welcome] = [a.event for a in told if isinstance(a, actions.Send)]
        adopted = [a for a in learner.handle(welcome, 0.0) if isinstance(a, actions.AdoptAll)]
        assert [a.position for a in adopted] == ["there"]


def test_a_new_process_draws_its_data_behind_an_offer_that_waits():
    """It may be merged yet, though its learner is gone."""
    syncer = SyncerCore(dataclasses.replace(POLICY, num_fragments=1, quorum=2), 20)
    for learner in range(2):
        syncer.handle(events.LearnerJoined(learner, 1), 0.0)
        syncer.handle(events.LearnerReady(learner, 1, 0, (0,)), 0.0)
    for learner, step in ((1, 3), (0, 4)):
        counters = (FragmentCounters(0, step, 10 * step),)
        syncer.handle(events.StepReported(Report(learner, 1, step, counters)), 4.0)
    upto = Watermark(1, 4, "after four")
    given = Contribution(0, 1, 0, 0, 4, 4, 40, upto=upto)
    syncer.handle(events.FragmentArrived(RoundId(4, 0), given), 4.5)
    syncer.handle(events.LearnerLost(0, 1, "died"), 5.0)
    told = syncer.handle(events.LearnerJoined(0, 2), 6.0)
    [welcome] = [a.event for a in told if isinstance(a, actions.Send)]
    assert (welcome.watermarks, welcome.data, welcome.data.position) == ((), upto, "after four")


def test_an_offer_counts_only_from_what_is_merged_of_its_learner():
    state = SyncerState((1,), (4,), ((0, 1),), (), ({0: Watermark(1, 4)},))
    syncer = SyncerCore(dataclasses.replace(POLICY, num_learners=1, num_fragments=1), 20, state)
    syncer.handle(events.LearnerJoined(0, 2, 6, (1,), (), 1), 0.0)
    syncer.handle(events.StepReported(Report(0, 2, 8, (FragmentCounters(1, 4, 40),))), 1.0)
    for since, counts in ((Watermark(1, 3), False), (Watermark(1, 4), True)):
        given = Contribution(0, 2, 0, 1, 8, 4, 40, 0, since, Watermark(1, 8))
        out = syncer.handle(events.FragmentArrived(RoundId(8, 0), given), 2.0)
        assert any(isinstance(action, actions.Merge) for action in out) is counts
        assert any(isinstance(action, actions.Drop) for action in out) is not counts
        syncer.handle(events.StepReported(Report(0, 2, 9, (FragmentCounters(1, 5, 50),))), 2.5)


def test_a_learner_that_was_blocked_is_so_until_the_update_comes():
    policy = SyncPolicy(num_learners=2, num_fragments=1, interval=4, overlap=0, quorum=None, max_run_ahead=0)
    core, _ = resumed(policy, clock=4, held=(FragmentWork(0, 0, 4, 40),))
    core.handle(events.UpdateArrived(0, 1, 4), 0.0)
    assert not core.blocked


def test_the_state_that_it_gives_is_a_copy():
    core, _ = resumed()
    before = core.work.fragments
    core.handle(events.StepStarted(10), 0.0)
    assert before[0].steps == 2


def test_a_syncer_that_starts_from_the_same_snapshot_lets_it_in_and_merges_what_it_held():
    learner, out = resumed(total_steps=20)
    marks = ({0: MARKS[0]}, {0: MARKS[1]})
    syncer = SyncerCore(POLICY, 20, SyncerState((3, 2), (12, 10), ((0, 6),), (0, 9), marks))
    told = [told for said in out for told in syncer.handle(said.event, 0.0)]
    assert (syncer.clocks, syncer.versions) == ({0: (7, 14)}, (3, 2))
    asked = [a.event for a in told if isinstance(a, actions.Send) and a.event.round == RoundId(14, 1)]
    made, sent = learner.handle(asked[0], 0.0)
    merges = syncer.handle(events.FragmentArrived(sent.round, sent.contribution), 0.0)
    [merge] = [action for action in merges if isinstance(action, actions.Merge)]
    assert merge.contributions == (made.contribution,)
    assert merge.round == RoundId(14, 1)


@pytest.mark.parametrize("held", [(), HELD[:1]])
def test_a_state_of_another_number_of_fragments_is_refused(held):
    with pytest.raises(LocalProtocolError, match="cannot be resumed"):
        LearnerCore(0, 7, POLICY).resume(LearnerWork(14, 5, 14, held))


def test_only_a_core_that_has_not_begun_takes_a_state_up():
    core, _ = resumed()
    with pytest.raises(LocalProtocolError):
        core.resume(core.work)
