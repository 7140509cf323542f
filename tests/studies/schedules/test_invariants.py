"""The checkers themselves: each rule, broken by hand, is a Violation that names it."""

import dataclasses
import types

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from experiments.studies.schedules.invariants import Invariants, LearnerInvariants
from experiments.studies.schedules.ledger import Violation

POLICY = SyncPolicy(num_learners=2, num_fragments=2, interval=2, overlap=1, quorum=2)
TOTAL = 8


class Run:
    """Two real learners, and a syncer whose every word is made up."""

    def __init__(self, policy=POLICY):
        self.together = LearnerInvariants(TOTAL)
        self.invariants = Invariants(policy, TOTAL, self.together)
        self.learners = [LearnerCore(number, 1, policy, TOTAL) for number in range(2)]
        self.contributions = {}
        self.restart()

    def restart(self):
        known = self.invariants.committed
        self.core = types.SimpleNamespace(
            rounds=(),
            offers=(),
            versions=known.versions,
            merged_steps=known.merged_steps,
            live=(0, 1),
            next_deadline=lambda: None,
            clocks={},
        )

    def syncer(self, event, *out):
        if isinstance(event, events.StepReported):
            report = event.report
            self.core.clocks[report.learner] = report.incarnation, report.step
        self.core.versions = self.invariants.committed.versions
        self.core.merged_steps = self.invariants.committed.merged_steps
        self.invariants.syncer_handled(self.core, event, list(out), 0.0)

    def learner(self, number, event):
        core = self.learners[number]
        out = core.handle(event, 0.0)
        self.together.handled(core, core, event, out)
        for action in out:
            if isinstance(action, actions.SendOffer):
                self.contributions[number, action.contribution.fragment] = action.contribution
        return out

    def enter(self, number):
        known = self.invariants.committed
        told = (known.step, known.versions, known.merged_steps)
        self.syncer(events.LearnerJoined(number, 1), welcome(number, 1, *told))
        self.learner(number, events.Welcomed(1, *told))
        self.syncer(events.LearnerReady(number, 1, known.step, known.versions), ready(number, 1))

    def ask(self, number, which):
        version = self.invariants.committed.versions[which.fragment]
        asked = events.OfferAsked(which, version, which.step)
        self.syncer(events.Timeout(), actions.Tell(((number, 1),), asked))
        self.learner(number, asked)

    def step(self, number):
        """One step, after being asked for what is due at its end."""
        due = self.learners[number].clock + 1
        self.ask(number, RoundId(due, due % 2))
        self.learner(number, events.StepStarted(10))
        for action in self.learner(number, events.StepFinished()):
            if isinstance(action, actions.TellSyncer):
                self.syncer(action.event)

    def gather(self):
        """Both learners are asked, step and offer; returns the merge that would be right."""
        for number in range(2):
            self.step(number)
        return self.arrive(RoundId(1, 1))

    def arrive(self, which):
        given = tuple(self.contributions[number, which.fragment] for number in range(2))
        for c in given:
            self.syncer(events.FragmentArrived(which, c))
        version = self.invariants.committed.versions[which.fragment] + 1
        return actions.Merge(which, version, given)


def welcome(learner, incarnation, step, versions, merged_steps):
    welcomed = events.Welcomed(incarnation, step, versions, merged_steps)
    return actions.Tell(((learner, incarnation),), welcomed)


def says(report):
    return actions.TellSyncer(events.StepReported(report))


def ready(learner, incarnation):
    return actions.Began("learner_ready", {}, learner, incarnation)


@pytest.fixture
def run():
    run = Run()
    for number in range(2):
        run.enter(number)
    return run


def broken(claim):
    return pytest.raises(Violation, match=claim)


def test_a_sound_merge_breaks_no_rule(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    marks = {c.learner: c.upto for c in merge.contributions}
    update = actions.Tell(((0, 1), (1, 1)), events.UpdateArrived(1, 1, 1), {1: marks})
    run.syncer(events.MergeFinished(merge.round), update)
    assert run.invariants.committed == SyncerState((0, 1), (0, 1), watermarks=({}, marks))
    assert run.invariants.checks > 10


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (lambda m: dataclasses.replace(m, version=2), "versions rise by one"),
        (lambda m: dataclasses.replace(m, contributions=m.contributions[:1]), "a merge has its quorum"),
        (lambda m: dataclasses.replace(m, contributions=m.contributions[:1] * 2), "gives once"),
        (lambda m: dataclasses.replace(m, contributions=()), "nothing is merged only for who waits"),
        (lambda m: dataclasses.replace(m, round=RoundId(2, 1)), "one of the schedule"),
        (lambda m: dataclasses.replace(m, round=RoundId(9, 1)), "past the last step"),
        (lambda m: dataclasses.replace(m, round=RoundId(3, 1)), "arrived while its learner took part"),
    ],
)
def test_an_unsound_merge_is_noticed(run, change, claim):
    merge = run.gather()
    with broken(claim):
        run.syncer(events.Timeout(), change(merge))


def test_a_contribution_on_another_version_is_noticed(run):
    merge = run.gather()
    first, second = merge.contributions
    other = dataclasses.replace(merge, contributions=(first, dataclasses.replace(second, version=1)))
    with broken("work is on one of the last versions"):
        run.syncer(events.Timeout(), other)


@pytest.mark.parametrize(
    ("field", "value", "claim"),
    [
        ("steps", 2, "steps are those taken"),
        ("tokens", 11, "was offered by the learner, with its tokens"),
        ("step", 7, "was offered by the learner"),
    ],
)
def test_a_contribution_that_says_more_than_was_done_is_noticed(run, field, value, claim):
    for number in range(2):
        run.step(number)
    lie = dataclasses.replace(run.contributions[0, 1], **{field: value})
    run.contributions[0, 1] = lie
    merge = run.arrive(RoundId(1, 1))
    with broken(claim):
        run.syncer(events.Timeout(), merge)


def test_work_that_is_merged_twice_is_noticed(run):
    """The same steps, offered to the next round as if they were on its version."""
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    ledger = run.together._ledgers[run.learners[0]]
    ledger._made[1, 1, 1, 1, 10] = ledger._made[1, 0, 1, 1, 10]
    for number in range(2):
        run.step(number)
        run.step(number)
        run.contributions[number, 1] = dataclasses.replace(run.contributions[number, 1], version=1)
    run.contributions[0, 1] = dataclasses.replace(merge.contributions[0], version=1)
    again = run.arrive(RoundId(3, 1))
    with broken("no step is merged twice"):
        run.syncer(events.Timeout(), again)


def test_a_batch_that_is_drawn_again_by_another_process_is_noticed(run):
    """Its steps are others, but what they learnt from is merged already."""
    merge = run.gather()
    ledger = run.together._ledgers[run.learners[0]]
    [_, (step, _)] = ledger.history
    ledger.history[1] = step, 7
    run.invariants._merged_batches[0, 7] = step + 1
    with broken("no batch is drawn twice of those merged"):
        run.syncer(events.Timeout(), merge)


def test_a_learner_that_is_told_another_watermark_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    update = actions.Tell(((0, 1), (1, 1)), events.UpdateArrived(1, 1, 1))
    with broken("a learner is told how far its work is in a version"):
        run.syncer(events.MergeFinished(merge.round), update)


def test_a_round_that_is_merged_again_after_a_crash_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    run.restart()
    with broken("rounds of a fragment come in order"):
        run.syncer(events.Timeout(), dataclasses.replace(merge, version=2))


def test_what_was_committed_and_forgotten_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    forgetful = types.SimpleNamespace(**{**vars(run.core), "versions": (0, 0), "merged_steps": (0, 0)})
    with broken("what is committed is known"):
        run.invariants.syncer_handled(forgetful, events.Timeout(), [], 0.0)


def test_a_commit_that_no_merge_of_this_life_stands_for_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.restart()
    run.syncer(events.Timeout())
    with broken("what is committed was being merged"):
        run.invariants.commit(merge)


def test_more_rounds_in_flight_than_the_overlap_are_noticed(run):
    first = run.gather()
    run.syncer(events.Timeout(), first)
    for number in range(2):
        run.step(number)
    second = run.arrive(RoundId(2, 0))
    with broken("at most 1 rounds are in flight"):
        run.syncer(events.Timeout(), second)


@pytest.mark.parametrize(
    ("asked", "claim"),
    [
        (events.OfferAsked(RoundId(1, 1), 0, 2), "nobody is to wait for a later step than the round's"),
        (events.OfferAsked(RoundId(1, 1), 1, 1), "the newest is asked for"),
        (events.OfferAsked(RoundId(2, 1), 0, 1), "one of the schedule"),
        (events.OfferAsked(RoundId(9, 1), 0, 1), "past the last step"),
    ],
)
def test_an_unsound_question_is_noticed(run, asked, claim):
    with broken(claim):
        run.syncer(events.Timeout(), actions.Tell(((0, 1),), asked))


def test_a_merge_before_a_quorum_has_come_to_the_step_is_noticed(run):
    merge = run.gather()
    report = Report(1, 1, 0, (FragmentCounters(0, 0, 0),) * 2)
    run.invariants._syncer.reports[1, 1] = report
    with broken("a quorum has come to the step"):
        run.syncer(events.Timeout(), merge)


def test_the_quorum_of_all_is_checked_over_all_that_are_live():
    run = Run(dataclasses.replace(POLICY, quorum=None))
    for number in range(2):
        run.enter(number)
    with broken("where all are needed, all give the round's step"):
        asked = events.OfferAsked(RoundId(2, 0), 0, 1)
        run.syncer(events.Timeout(), actions.Tell(((0, 1),), asked))
    run.step(0)
    run.step(0)
    run.step(1)
    c = run.contributions[0, 0]
    run.syncer(events.FragmentArrived(RoundId(2, 0), c))
    with broken("the quorum of all is of all that are live"):
        run.syncer(events.Timeout(), actions.Merge(RoundId(2, 0), 1, (c,)))


@pytest.mark.parametrize("end", ["lost", "replaced", "crashed"])
def test_a_departed_incarnation_that_takes_part_is_noticed(run, end):
    run.step(0)
    if end == "lost":
        run.syncer(events.LearnerLost(0, 1, "its host died"))
    elif end == "replaced":
        run.syncer(events.LearnerJoined(0, 2), welcome(0, 2, 0, (0, 0), (0, 0)))
    else:
        run.restart()
    with broken("members alone are asked"):
        run.syncer(events.Timeout(), actions.Tell(((0, 1),), events.OfferAsked(RoundId(1, 1), 0, 1)))
    with broken("members alone are spoken to"):
        run.syncer(events.Timeout(), actions.Tell(((0, 1),), events.UpdateArrived(0, 0, 0)))
    with broken(r"none that departed comes back|the newest incarnation counts"):
        run.syncer(events.LearnerReady(0, 1, 0, (0, 0)), ready(0, 1))
    with broken("those are welcomed that join"):
        run.syncer(events.LearnerJoined(0, 1), welcome(0, 1, 0, (0, 0), (0, 0)))


@pytest.mark.parametrize(
    ("action", "claim"),
    [
        (actions.Tell(((0, 1),), events.ClockSet(5)), "a clock is set to a step that was reported"),
        (actions.Tell(((0, 1),), events.UpdateArrived(0, 1, 2)), "what is committed is broadcast"),
        (
            actions.Tell(((0, 1),), events.Rejected(1, "a newer incarnation is known")),
            "only the replaced are rejected",
        ),
        (actions.Finish(), "every round is merged, skipped or abandoned at the end"),
        (actions.Record("round_skipped", {"step": 2, "fragment": 1}), "one of the schedule"),
    ],
)
def test_an_unsound_word_of_the_syncer_is_noticed(run, action, claim):
    run.step(0)
    with broken(claim):
        run.syncer(events.Timeout(), action)


def test_a_merged_round_that_is_given_up_later_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    with broken("what is merged is not given up"):
        run.syncer(events.Timeout(), actions.Record("round_skipped", {"step": 1, "fragment": 1}))


def test_a_welcome_with_old_versions_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    run.invariants.commit(merge)
    with broken("a welcome tells what is committed"):
        run.syncer(events.LearnerJoined(0, 2), welcome(0, 2, 0, (0, 0), (0, 0)))


def test_a_deadline_that_has_passed_is_noticed(run):
    run.core.next_deadline = lambda: 0.0
    with broken("acted on at once"):
        run.syncer(events.Timeout())


def test_two_processes_of_one_incarnation_are_noticed(run):
    double = LearnerCore(0, 1, POLICY, TOTAL)
    event = events.Welcomed(1, 0, (0, 0), (0, 0))
    with broken("two processes never go by one incarnation"):
        run.together.handled(double, double, event, double.handle(event, 0.0))
