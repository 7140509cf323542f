"""The checkers themselves: each rule, broken by hand, is a Violation that names it."""

import dataclasses
import types

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from experiments.studies.schedules.integers import Parameters
from experiments.studies.schedules.invariants import Invariants, LearnerInvariants
from experiments.studies.schedules.ledger import ProcessLedger, Violation

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
        self.syncer(events.Timeout(), actions.Send(((number, 1),), asked))
        self.learner(number, asked)

    def step(self, number):
        """One step, after being asked for what is due at its end."""
        due = self.learners[number].clock + 1
        self.ask(number, RoundId(due, due % 2))
        self.learner(number, events.StepStarted(10))
        for action in self.learner(number, events.StepFinished()):
            if isinstance(action, actions.SendToSyncer):
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
    return actions.Send(((learner, incarnation),), welcomed)


def says(report):
    return actions.SendToSyncer(events.StepReported(report))


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
    update = actions.Send(((0, 1), (1, 1)), events.UpdateArrived(1, 1, 1), {1: marks})
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
        (
            lambda m: dataclasses.replace(
                m, contributions=(m.contributions[0], dataclasses.replace(m.contributions[1], version=1))
            ),
            "work is on one of the last versions",
        ),
    ],
)
def test_an_unsound_merge_is_noticed(run, change, claim):
    merge = run.gather()
    with broken(claim):
        run.syncer(events.Timeout(), change(merge))


def test_an_offer_that_is_not_what_its_steps_have_added_is_noticed(run):
    merge = run.gather()
    run.syncer(events.Timeout(), merge)
    with broken("an offer is what its steps have added"):
        run.invariants.commit(merge, given=dict.fromkeys(merge.contributions, (-7,)))


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
        run.syncer(events.Timeout(), actions.Send(((0, 1),), asked))


def test_a_departed_incarnation_that_takes_part_is_noticed(run):
    run.step(0)
    run.syncer(events.LearnerLost(0, 1, "its host died"))
    with broken("members alone are asked"):
        run.syncer(events.Timeout(), actions.Send(((0, 1),), events.OfferAsked(RoundId(1, 1), 0, 1)))
    with broken("members alone are spoken to"):
        run.syncer(events.Timeout(), actions.Send(((0, 1),), events.UpdateArrived(0, 0, 0)))
    with broken(r"none that departed comes back|the newest incarnation counts"):
        run.syncer(events.LearnerReady(0, 1, 0, (0, 0)), ready(0, 1))
    with broken("those are welcomed that join"):
        run.syncer(events.LearnerJoined(0, 1), welcome(0, 1, 0, (0, 0), (0, 0)))


@pytest.mark.parametrize(
    ("action", "claim"),
    [
        (actions.Send(((0, 1),), events.ClockSet(5)), "a clock is set to a step that was reported"),
        (actions.Send(((0, 1),), events.UpdateArrived(0, 1, 2)), "what is committed is broadcast"),
        (
            actions.Send(((0, 1),), events.Rejected(1, "a newer incarnation is known")),
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


# What a learner says, held against its ledger.

UPTO = Watermark(1, 1)


@pytest.fixture
def booked():
    core, ledger = LearnerCore(0, 1, POLICY, TOTAL), ProcessLedger()
    for event in (events.Welcomed(1, 0, (0, 0), (0, 0)), events.StepStarted(10), events.StepFinished()):
        ledger.handled(core, event, core.handle(event, 0.0))
    return core, ledger


def test_parameters_that_are_not_a_version_and_work_on_it_are_noticed(booked):
    core, ledger = booked
    versions = {(0, 0, 0): 5, (1, 0, 0): 6}
    event = events.StepStarted(10)
    ledger.handled(core, event, core.handle(event, 0.0), 0, Parameters([5 + 3, 6 + 2 * 3], 3, versions))
    event = events.StepFinished()
    with broken("parameters are a version and work on it"):
        ledger.handled(core, event, core.handle(event, 0.0), 0, Parameters([8, 11], 3, versions))


@pytest.mark.parametrize(
    ("counters", "claim"),
    [
        ((FragmentCounters(0, 2, 20), FragmentCounters(0, 1, 10)), "a report counts the steps since"),
        ((FragmentCounters(0, 1, 10), FragmentCounters(0, 0, 0)), "a report counts the steps since"),
        (
            (FragmentCounters(0, 1, 11), FragmentCounters(0, 1, 10)),
            "tokens are those of the steps counted, 10",
        ),
        (
            (FragmentCounters(1, 1, 10), FragmentCounters(0, 1, 10)),
            "a report names versions that were applied",
        ),
    ],
)
def test_a_false_report_is_noticed(booked, counters, claim):
    core, ledger = booked
    with broken(claim):
        ledger.handled(core, events.Heartbeat(), [says(Report(0, 1, 1, counters))])


@pytest.mark.parametrize(
    ("offer", "claim"),
    [
        (Contribution(0, 1, 0, 0, 1, 2, 20, upto=UPTO), "an offer's steps are those since its version"),
        (Contribution(0, 1, 0, 1, 1, 1, 10), "an offer is anchored on the version held"),
        (Contribution(0, 1, 0, 0, 5, 1, 10), "an offer bears the learner's clock"),
        (Contribution(0, 1, 0, 0, 1, 1, 10, upto=Watermark(1, 2)), "an offer is of a step boundary"),
        (Contribution(0, 1, 0, 0, 1, 1, 12, upto=UPTO), "tokens are those of the steps counted, 10"),
    ],
)
def test_a_false_offer_is_noticed(booked, offer, claim):
    core, ledger = booked
    with broken(claim):
        ledger.handled(core, events.Heartbeat(), [actions.MakeOffer(offer)])
