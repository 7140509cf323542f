"""Runs whose steps are skipped, in the drivers of one process: what they count, say, and end with."""

import json
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddiloco
from ddiloco.run.job import run_job
from ddiloco.settings.experiment import parse
from ddiloco.storage import checkpoints
from experiments.cli import exit_handling
from tests.workbench import devices, experiment

HOT = {
    "inner": {"learning_rate": 1e6, "warmup_steps": 0},
    "train": {"steps": 60},
    "sync": {"interval": 12},
    "outer": {"guard": {"gates": ()}},
}


def run(e, workdir, make_loop=None):
    with devices(1):
        return run_job(e, workdir, threading.Event(), make_loop=make_loop)


def steps_of(workdir, learner):
    return [json.loads(line) for line in (workdir / f"learners/{learner}/steps.jsonl").open()]


@pytest.mark.parametrize(
    ("driver", "algorithm"),
    [
        ("virtual", "decoupled"),
        ("local", "lone_learner"),
        pytest.param("virtual", "data_parallel", marks=pytest.mark.slow),
        pytest.param("local", "diloco", marks=pytest.mark.slow),
        pytest.param("virtual", "streaming", marks=pytest.mark.slow),
        pytest.param("virtual", "diloco", marks=pytest.mark.slow),
        pytest.param("local", "decoupled", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_learns_nothing_ends_with_what_was_good(driver, algorithm, data_dir, tmp_path, capsys):
    result = run(experiment(data_dir, algorithm, driver=driver, **HOT), tmp_path)
    assert result.failure.startswith("from step ") and "inner.learning_rate" in result.failure
    s = result.summary
    assert s["step"] < (30 if driver == "virtual" else 60) and not s["finished"] and not s["interrupted"]
    assert result.failure in s["alarms"] and any("learner 0: skips steps" in alarm for alarm in s["alarms"])
    told = [line for m in s["tokens"] for line in steps_of(tmp_path, m)]
    assert {line["tokens"] for line in told if line.get("skipped")} == {0}
    assert sum(s["tokens"].values()) == sum(line["tokens"] for line in told)
    assert s["skipped_steps"] == sum(line.get("skipped", 0) for line in told) > 0.8 * len(told)
    if driver == "virtual":
        assert s["goodput"] == pytest.approx(1 - sum(s["lost"].values())) and s["goodput"] < 0.3
    else:
        assert s["lost"]["skipping"] > 0.2
    assert (s["merged_share"] or 0.0) <= 1.0
    params = checkpoints.restore(tmp_path / "checkpoints").params
    assert all(np.isfinite(value).all() for value in params.values())
    assert exit_handling.print_result(result, tmp_path, []) == 1
    told = capsys.readouterr()
    assert "ended early" in told.out and told.err.splitlines()[-1] == f"error: {result.failure}"


@pytest.mark.parametrize("algorithm", ["diloco", pytest.param("streaming", marks=pytest.mark.slow)])
def test_where_learners_wait_and_the_guard_leaves_out_all_that_they_offer_the_run_goes_on(
    algorithm, data_dir, tmp_path
):
    """They stood still for good: they were asked again and again for the same offers."""
    guarded = {name: group for name, group in HOT.items() if name != "outer"}
    result = run(experiment(data_dir, algorithm, **guarded), tmp_path)
    assert result.summary["step"] > 12
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").open()]
    assert any(not line["quorum"] and line["left_out"] for line in rounds)
    params = checkpoints.restore(tmp_path / "checkpoints").params
    assert all(np.isfinite(value).all() for value in params.values())


def make_loop(place, bad=(), evaluation=0.0):
    """A loop that skips the steps whose gradient is not finite, which those of bad learners mostly are."""

    def step(state, batch):
        gradient = jax.grad(lambda params: jnp.mean((batch - params["w"]) ** 2))(state)
        skipped = ~jnp.isfinite(gradient["w"]).all()
        new = jax.tree.map(lambda w, g: jnp.where(skipped, w, w - 0.5 * g), state, gradient)
        return new, {"loss": jnp.mean((batch - state["w"]) ** 2), "skipped": skipped}

    def batches():
        random = np.random.default_rng((place.seed, place.learner))
        while True:
            batch = random.normal(1.0, 0.1, (4, 8)).astype(np.float32)
            if place.learner in bad and random.random() < 0.95:
                batch[0, 0] = np.nan
            yield batch

    return ddiloco.Loop(
        lambda: {"w": jnp.zeros(8)},
        step,
        batches,
        params=lambda state: state,
        evaluate=lambda params: float(evaluation + jnp.mean((params["w"] - 1.0) ** 2)),
    )


def loop_experiment(driver, algorithm="decoupled", learners=4, **settings):
    factory = "tests.run.test_skipped_steps:make_loop"
    steps = {"min_step_seconds": (0.01,) * learners} if driver == "local" else {}
    paced = {"quorum": None, "max_run_ahead": 0, "overlap": 0} if algorithm == "diloco" else {"quorum": 1}
    return parse(
        {
            "algorithm": algorithm,
            "driver": driver,
            "model": {"name": "loop", "factory": factory, "settings": settings},
            "sync": {"num_learners": learners, "num_fragments": 1, "interval": 6, **paced},
            "train": {"steps": 48, **steps},
            "eval": {"every": 12},
            "log": {"page": ""},
        }
    )


@pytest.mark.parametrize(
    ("driver", "algorithm"),
    [
        ("virtual", "decoupled"),
        pytest.param("local", "diloco", marks=pytest.mark.slow),
        pytest.param("local", "decoupled", marks=pytest.mark.slow),
    ],
)
def test_where_one_learner_skips_the_others_train_on(driver, algorithm, tmp_path):
    result = run(loop_experiment(driver, algorithm, bad=[2]), tmp_path)
    s = result.summary
    assert result.failure is None and s["finished"] and s["eval_loss"] < 0.1
    left_out = "of its work is merged"  # as where a busy machine slows one learner
    assert {alarm.split(":")[0] for alarm in s["alarms"] if left_out not in alarm} == {"learner 2"}
    assert s["tokens"]["2"] < 0.3 * s["tokens"]["0"]
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").open()]
    given = [c for line in rounds for c in line["contributions"]]
    assert all(steps >= 1 and tokens == 4 * steps for *_, steps, tokens in given)
    of_two = sum(tokens for learner, *_, tokens in given if learner == 2)
    assert of_two <= s["tokens"]["2"]
    assert len(rounds) + s["rounds_skipped"] + s["rounds_abandoned"] == 48 // 6


def test_where_all_skip_a_loop_of_ones_own_ends_too(tmp_path):
    result = run(loop_experiment("virtual", bad=[0, 1, 2, 3]), tmp_path)
    assert result.failure.startswith("from step ") and result.summary["step"] < 48


def test_a_held_out_loss_that_is_not_finite_is_an_alarm_and_the_last_word(tmp_path, capsys):
    result = run(loop_experiment("local", learners=2, evaluation=math.inf), tmp_path)
    assert [alarm for alarm in result.summary["alarms"] if "held-out loss is inf from step 0" in alarm]
    assert exit_handling.print_result(result, tmp_path, []) == 0
    assert "held-out loss is not finite, goodput" in capsys.readouterr().out
