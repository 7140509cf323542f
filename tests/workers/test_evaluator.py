"""The evaluator's thread: what it scores, what it passes over, and that it ends."""

import threading
import weakref

import numpy as np
import pytest

from ddiloco.telemetry.records import Evaluated
from ddiloco.training.evaluation import Score
from ddiloco.workers.evaluator import Evaluations, Evaluator, unless
from tests.remote.ends import until


class Scoring:
    """A score that can be held up, and tells when one is under way."""

    def __init__(self, failing=()):
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.scored = []
        self.failing = failing

    def __call__(self, params):
        self.started.release()
        assert self.go_on.wait(30)
        self.scored.append(params["step"])
        if params["step"] in self.failing:
            raise ValueError("no device")
        return Score(float(params["step"]), {"accuracy": 0.5})


@pytest.fixture
def made():
    def make(score, every=10, initial=None):
        evaluator = Evaluator(score, every, lambda: 77, taken.append)
        evaluator.start(initial)
        return evaluator, taken

    taken = []
    return make


def offer(evaluator, step):
    evaluator.offer(step, lambda: {"step": step})


def test_offers_are_passed_over_while_it_is_busy(made):
    score = Scoring()
    evaluator, taken = made(score)
    offer(evaluator, 10)
    assert score.started.acquire(timeout=30)
    for step in (20, 30, 40):  # one waits, the others are passed over
        offer(evaluator, step)
    score.go_on.set()
    assert evaluator.stop(30)
    assert score.scored == [10, 20]
    assert [(r.step, r.tokens, r.loss) for r in taken] == [(10, 77, 10.0), (20, 77, 20.0)]


@pytest.mark.parametrize(
    ("every", "steps", "scored"), [(10, [3, 9, 12, 19, 25], [12, 25]), (0, [5, 10, 100], [])]
)
def test_the_first_offer_from_each_multiple_on_is_scored(made, every, steps, scored):
    score = Scoring()
    score.go_on.set()
    evaluator, taken = made(score, every)
    for step in steps:
        offer(evaluator, step)
        while len(taken) < sum(s <= step for s in scored):
            assert score.started.acquire(timeout=30)
    assert evaluator.stop(30)
    assert [record.step for record in taken] == scored


def test_parameters_that_were_scored_are_not_kept_until_the_next_are_offered(made):
    score = Scoring()
    score.go_on.set()
    evaluator, taken = made(score)
    theta = np.zeros(3, np.float32)
    kept = weakref.ref(theta)
    evaluator.offer(10, lambda theta=theta: {"step": 10, "theta": theta})
    del theta
    until(lambda: taken and kept() is None, "the end of the parameters", timeout=10.0)
    assert evaluator.stop(30)


def test_stopping_is_bounded_when_an_evaluation_hangs(made):
    score = Scoring()
    evaluator, _ = made(score)
    offer(evaluator, 10)
    assert score.started.acquire(timeout=30)
    assert evaluator.stop(0.05) is False
    offer(evaluator, 20)
    assert evaluator.stop(0.05) is False
    score.go_on.set()


def test_an_evaluation_that_fails_is_kept_and_the_next_is_scored(made):
    score = Scoring(failing={10})
    score.go_on.set()
    evaluator, taken = made(score)
    offer(evaluator, 10)
    while not score.scored:
        assert score.started.acquire(timeout=30)
    offer(evaluator, 20)
    assert evaluator.stop(30)
    assert evaluator.failure == "at step 10: ValueError: no device"
    assert [record.step for record in taken] == [20]


@pytest.mark.parametrize("every", [10, 0])
def test_initial_parameters_are_scored_first_however_often_others_are(made, every):
    score = Scoring()
    score.go_on.set()
    evaluator, taken = made(score, every, {"step": 0})
    assert score.started.acquire(timeout=30)
    offer(evaluator, 10)
    assert evaluator.stop(30)
    assert [record.step for record in taken] == ([0, 10] if every else [0])
    assert taken[0] == Evaluated(0, 77, taken[0].time, 0.0, {"accuracy": 0.5})
    assert not evaluator.broken


def test_a_first_evaluation_that_fails_is_known_at_once(made):
    score = Scoring(failing={0})
    evaluator, taken = made(score, initial={"step": 0})
    assert not evaluator.broken
    score.go_on.set()
    until(lambda: evaluator.broken, "the failure")
    assert evaluator.failure == "at step 0: ValueError: no device" and not taken
    assert evaluator.stop(30)


def test_an_evaluation_is_abandoned_at_its_next_call_of_the_devices_once_the_run_is_to_stop():
    stop, made, taken = threading.Event(), [], []

    def batch(number):
        made.append(number)
        if number == 1:
            stop.set()
        return float(number)

    def score(params):
        return Score(sum(unless(stop, lambda i=i: batch(i)) for i in range(params["batches"])))

    evaluations = Evaluations(score, 0, taken.append)
    assert evaluations.evaluate(4, 77, {"batches": 1}) == 0.0
    assert evaluations.evaluate(8, 99, {"batches": 9}) is None
    assert (made, [one.step for one in taken]) == ([0, 0, 1], [4])
