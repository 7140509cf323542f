"""Budgets of tokens and of virtual time: how many steps a fleet takes within them."""

import dataclasses

import pytest

from ddiloco.run.job import with_steps
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import step_tokens
from ddiloco.telemetry import records
from ddiloco.virtual import run as virtual_run
from tests.virtual.test_from_settings import FAILURES, SCAVENGING
from tests.virtual_runs import run_job, run_timed, virtual


@pytest.fixture
def made(data_dir):
    return lambda algorithm="decoupled", **groups: virtual(data_dir, algorithm, **groups)


@pytest.mark.parametrize(
    ("algorithm", "seconds", "steps"),
    [("decoupled", 10.0, 10), ("diloco", 10.2, 10), ("data_parallel", 9.9, 9), ("lone_learner", 0.5, 1)],
)
def test_a_budget_of_time_gives_every_algorithm_the_steps_that_end_within_it(algorithm, seconds, steps, made):
    e = made(algorithm, virtual={"seconds": seconds})
    e = with_steps(e, lambda: assembly_of(e))
    assert e.train.steps == steps
    assert run_timed(e).records[-1].time == pytest.approx(steps)


@pytest.mark.parametrize("algorithm", ["decoupled", "diloco", "data_parallel"])
def test_a_budget_of_time_holds_to_the_last_step_of_the_slowest_learner(algorithm, made):
    e = made(algorithm, virtual={"seconds": 31.0, "step_seconds": (1.0, 3.0)})
    e = with_steps(e, lambda: assembly_of(e))
    ends = []
    for steps in (e.train.steps, e.train.steps + 1):
        run = run_timed(dataclasses.replace(e, train=dataclasses.replace(e.train, steps=steps)))
        ends.append(max(record.time for record in run.of(records.StepDone)))
    assert ends[0] <= 31.0 < ends[1]


@pytest.mark.parametrize("algorithm", ["decoupled", "data_parallel", "elastic_data_parallel"])
def test_a_token_budget_is_met_within_a_few_percent(algorithm, made, tmp_path):
    budget = 1500
    result = run_job(made(algorithm, train={"tokens": budget}, virtual={"arrays": False}), tmp_path)
    assert result.summary["step"] == 12
    assert sum(result.summary["tokens"].values()) == pytest.approx(budget, rel=0.05)


@pytest.mark.parametrize(
    ("learners", "values"),
    [
        (2, FAILURES),
        pytest.param(4, SCAVENGING, marks=pytest.mark.slow),
        pytest.param(3, {"step_variation": 0.3, "latency": (0.2,), "loss": (0.05,)}, marks=pytest.mark.slow),
    ],
    ids=["failures", "spare capacity", "noise"],
)
def test_a_fleet_of_any_life_meets_its_token_budget(learners, values, made):
    budget = 24_000
    e = made(virtual=values, sync={"num_learners": learners}, train={"tokens": budget})
    e = with_steps(e, lambda: assembly_of(e))
    run = run_timed(e)
    assert run.outcome.finished
    assert sum(run.tokens.values()) == pytest.approx(budget, rel=0.03)


@pytest.mark.slow
def test_a_token_budget_holds_to_the_last_step_of_the_slowest_learner(made):
    """Eight learners, of which four are 18% slower and all are of different speeds."""
    uneven = {
        "step_seconds": (1.0,) * 4 + (1.18,) * 4,
        "speed_variation": 0.1,
        "step_variation": 0.02,
    }
    e = made(
        virtual=uneven,
        sync={"num_learners": 8, "num_fragments": 12, "interval": 24},
        data={"sequence_length": 128},
        train={"batch_size": 4, "tokens": 491_520},
    )
    run = run_timed(with_steps(e, lambda: assembly_of(e)))
    assert run.outcome.finished
    assert sum(run.tokens.values()) == pytest.approx(491_520, abs=step_tokens(e) * 8)


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 1), (128, 1), (192, 2), (1500, 12), (1536, 12), (1590, 12), (1600, 13)]
)
def test_of_learners_that_are_alike_a_token_budget_is_as_many_steps_as_come_nearest(tokens, steps, made):
    """A step of both has 128 tokens."""
    e = made(train={"tokens": tokens})
    assert with_steps(e, lambda: assembly_of(e)).train.steps == steps


def test_the_nearest_number_of_steps_is_found_in_few_tries_also_where_steps_grow():
    tried = []

    def trained(steps):
        tried.append(steps)
        return 10 * min(steps, 300) + 25 * max(0, steps - 300)

    assert virtual_run._nearest(5000, 420, trained) == 380
    assert len(tried) <= 8
