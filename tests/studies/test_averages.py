"""Scores of averages and of learners beside those of the global model, while learners come and go."""

import json
import threading

import numpy as np
import pytest

from ddiloco.baselines.wall import JobArrays
from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.run.recipes import assembly_of
from ddiloco.virtual.availability import Change, write_trace
from experiments.studies import averages
from experiments.studies.averages import AVERAGE, AVERAGES, GLOBAL
from tests import workbench
from tests.virtual_runs import virtual

OF_ROUNDS = list(AVERAGES)


def test_an_average_over_rounds_is_the_weighted_mean_of_the_versions():
    rng = np.random.default_rng(0)
    draw = lambda: {"a": rng.standard_normal((4, 2)).astype(np.float32)}  # noqa: E731
    model = GlobalModel(fragment({"a": (4, 2)}, 2), draw(), OuterConfig(optimizer="direct"), 1)
    average = averages.RoundAverage(model, 4)
    np.testing.assert_array_equal(average.parameters()["a"], model.parameters()["a"])
    versions: list[list[np.ndarray]] = [[], []]
    for p in (0, 1, 0, 0, 1, 0):
        whole = draw()["a"]
        model.merge(p, [model.read(p, (whole[2 * p : 2 * p + 2],))], [(1, 1)])
        versions[p].append(model.parameters()["a"][2 * p : 2 * p + 2].astype(np.float64))
        average.look()
        average.look()  # nothing is new
    for p, seen in enumerate(versions):
        weights = 0.75 ** np.arange(len(seen))[::-1]
        want = np.tensordot(weights / weights.sum(), np.stack(seen), 1)
        np.testing.assert_allclose(average.parameters()["a"][2 * p : 2 * p + 2], want, rtol=1e-5)


def test_all_that_is_scored_is_scored_on_the_same_rows_and_dead_learners_are_not(data_dir, tmp_path):
    changes = [Change(9.5, 0, "fail"), Change(21.5, 1, "fail")]
    write_trace(tmp_path / "availability.csv", changes)
    lives = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    e = virtual(data_dir, virtual=lives, eval={"every": 4}, train={"steps": 40})
    with workbench.devices(1):
        points = averages.scored_run(e, threading.Event())
    scored: dict[int, dict[str, float]] = {}
    for point in points:
        scored.setdefault(point["step"], {})[point["name"]] = point["loss"]
    assert scored.pop(0).keys() == {GLOBAL}
    assert scored.popitem()[1].keys() == {GLOBAL, *OF_ROUNDS}
    assert scored[4].keys() == {"learner 0", "learner 1", AVERAGE, GLOBAL, *OF_ROUNDS}
    assert scored[16].keys() == {"learner 1", AVERAGE, GLOBAL, *OF_ROUNDS}
    assert scored[16]["learner 1"] == scored[16][AVERAGE]  # of one
    assert len(set(scored[16].values())) == 2 + len(OF_ROUNDS)


def test_what_the_last_rounds_give_is_seen_beside_the_model_without_them(data_dir):
    e = virtual(data_dir, train={"steps": 7}, sync={"interval": 4, "num_fragments": 3}, eval={"every": 0})
    with workbench.devices(1):
        scored = {point["name"]: point["loss"] for point in averages.scored_run(e, threading.Event())}
    assert scored[averages.WITHOUT_LAST] != scored[GLOBAL]


@pytest.mark.slow
def test_a_job_without_learners_has_averages_over_the_steps_of_as_many_rounds(data_dir):
    e = virtual(
        data_dir, algorithm="data_parallel", train={"steps": 6}, eval={"every": 4}, sync={"interval": 2}
    )
    with workbench.devices(1):
        points = averages.scored_run(e, threading.Event())
        job, seen = JobArrays(assembly_of(e)), []
        job.begin()
        for step in range(6):
            job.step(step)
            seen.append({name: np.float64(value) for name, value in job.params.items()})
        weights = (1 - 1 / 4) ** np.arange(6)[::-1]  # two rounds of two steps
        mean = {name: np.average([one[name] for one in seen], 0, weights) for name in seen[0]}
        want = job.scorer()({name: np.float32(value) for name, value in mean.items()}).loss
    losses = {(point["step"], point["name"]): point["loss"] for point in points}
    assert list(losses) == [(0, GLOBAL), *((step, name) for step in (4, 6) for name in (GLOBAL, *OF_ROUNDS))]
    assert losses[6, OF_ROUNDS[0]] == pytest.approx(want, rel=1e-6)
    assert len(set(losses.values())) == len(losses)


def test_the_table_has_the_last_evaluation_of_each_seed():
    losses = {0: {GLOBAL: 2.0, AVERAGE: 1.9}, 1: {GLOBAL: 3.0, AVERAGE: 3.3}}
    points = [{"seed": 0, "step": 4, "name": GLOBAL, "loss": 9.0}]
    for seed, own in losses.items():
        points += [{"seed": seed, "step": 8, "name": name, "loss": loss} for name, loss in own.items()]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in averages.table(points).splitlines()[2:]
    ]
    assert rows == [
        [GLOBAL, "2", "2.5000 ± 0.7071", "+0.00% ± 0.00%"],
        [AVERAGE, "2", "2.6000 ± 0.9899", "+2.50% ± 10.61%"],
    ]


@pytest.mark.slow
def test_the_program_trains_once_for_each_seed_and_draws(programs, tmp_path):
    small = ["--config.train.steps=4", "--config.inner.warmup_steps=0", "--config.eval.every=2"]
    small += ["--config.eval.num_batches=1", "--config.sync.interval=2", "--config.sync.num_fragments=2"]
    small += ["--config.model.num_layers=1"]
    given = ["--config=configs/micro.py", *small, "--seeds=3,5", f"--output={tmp_path}"]
    done = programs.run("averages", *given)
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "averages.json").read_text())
    assert {point["seed"] for point in points} == {3, 5}
    assert [point["step"] for point in points if (point["seed"], point["name"]) == (5, GLOBAL)] == [0, 2, 4]
    assert (tmp_path / "averages.png").read_bytes().startswith(b"\x89PNG")
    assert f"| {OF_ROUNDS[0]} " in done.stdout
