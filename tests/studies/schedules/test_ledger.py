"""What a learner says, held against its ledger: each rule, broken by hand, is a Violation that names it."""

import types

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, Watermark
from experiments.studies.schedules.ledger import ProcessLedger
from tests.studies.schedules.test_invariants import POLICY, TOTAL, broken, says

UPTO = Watermark(1, 1)


@pytest.fixture
def booked():
    core, ledger = LearnerCore(0, 1, POLICY, TOTAL), ProcessLedger()
    for event in (events.Welcomed(1, 0, (0, 0), (0, 0)), events.StepStarted(10), events.StepFinished()):
        ledger.handled(core, event, core.handle(event, 0.0))
    return core, ledger


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


def test_a_report_of_another_incarnation_or_an_earlier_step_is_noticed(booked):
    core, ledger = booked
    sound = (FragmentCounters(0, 1, 10), FragmentCounters(0, 1, 10))
    with broken("a report bears the current incarnation"):
        ledger.handled(core, events.Heartbeat(), [says(Report(0, 2, 1, sound))])
    with broken("a learner's reported clock never falls"):
        ledger.handled(core, events.Heartbeat(), [says(Report(0, 1, 0, sound))])


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


def test_a_version_that_falls_is_noticed(booked):
    core, ledger = booked
    with broken("a learner's versions only rise"):
        ledger.handled(core, events.Heartbeat(), [actions.ApplyUpdate(0, 0, 0.0)])


def test_an_update_that_was_applied_and_not_said_is_noticed(booked):
    core, ledger = booked
    core.handle(events.UpdateArrived(0, 1, 2), 0.0)
    with broken("a learner holds what it applied"):
        ledger.handled(core, events.Heartbeat(), [])


def test_an_unbounded_learner_that_waits_is_noticed(booked):
    _, ledger = booked
    waiting = types.SimpleNamespace(
        policy=POLICY, blocked=True, versions=(0, 0), incarnations=(1,), learner=0, clock=1, recovered=True
    )
    with broken("a learner without a bound never waits"):
        ledger.handled(waiting, events.Heartbeat(), [])
