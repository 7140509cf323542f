"""One learner of five lies while real models train in virtual time."""

import math
import threading

import pytest

from ddiloco.run.recipes import assembly_of
from experiments.studies import byzantine
from tests.virtual_runs import virtual
from tests.workbench import devices

STEPS, LIAR = 32, 4
OFTEN = ("scaled", "nan in one tensor")
SETTINGS = {
    "sync": {"num_learners": 5, "quorum": 4},
    "virtual": {"step_variation": 0.02},
    "train": {"steps": STEPS},
}


@pytest.fixture(scope="module")
def outcome(data_dir):
    """What becomes of a run whose last learner tells this lie; None: it is honest."""
    known = {}

    def outcome_of(lie, experiment=None):
        key = (lie, experiment is not None)
        if key not in known:
            e = experiment or virtual(data_dir, **SETTINGS)
            taken: list = []
            with devices(1):
                assembly = assembly_of(e)
                liars = {} if lie is None else {LIAR: lie}
                run = byzantine.LyingRun(assembly, taken.append, threading.Event(), liars=liars)
                known[key] = byzantine.outcome(taken, run.run())
        return known[key]

    return outcome_of


def test_of_honest_learners_nobody_is_left_out(outcome):
    honest = outcome(None)
    assert honest.rounds >= 3 * (STEPS // 4 - 1)
    assert (honest.left_out, honest.alarms) == ({}, ())


@pytest.mark.parametrize(
    "lie",
    ["scaled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("flipped and scaled", "flipped"))],
)
def test_a_liar_is_left_out_and_nobody_else(outcome, lie):
    lied = outcome(lie)
    assert lied.left_out.keys() == {LIAR}
    assert lied.quarantined == (LIAR,)
    assert lied.left_out[LIAR] > lied.rounds / 2
    assert any(alarm.startswith(f"learner {LIAR} is in quarantine") for alarm in lied.alarms)


@pytest.mark.parametrize(
    "lie", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in byzantine.KINDS]
)
def test_the_loss_is_at_most_one_percent_above_the_honest_runs(outcome, lie):
    assert outcome(lie).loss < 1.01 * outcome(None).loss


@pytest.mark.slow
def test_without_the_guard_a_liar_ruins_the_run(outcome, data_dir):
    ungated = byzantine.without_gates(virtual(data_dir, **SETTINGS))
    assert outcome("scaled", ungated).length > 1e3 * outcome(None).length
    assert outcome("scaled").length < 1.1 * outcome(None).length


def test_a_tensor_of_nan_never_comes_to_a_merge(outcome):
    lied = outcome("nan in one tensor")
    assert not lied.left_out
    assert math.isfinite(lied.loss)
    assert all(alarm.startswith(f"learner {LIAR} sent what cannot be merged: ") for alarm in lied.alarms)
    assert lied.alarms
