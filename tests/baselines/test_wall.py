"""The baselines against loops written out by hand, and the checks that come before any run."""

import threading

import pytest

from ddiloco.baselines.wall import BaselineRun
from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.run.job import run_job, set_aside
from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from tests.workbench import assert_equal, devices, experiment


@pytest.mark.parametrize(("algorithm", "shards"), [("data_parallel", (0, 1)), ("lone_learner", (0,))])
def test_a_baseline_is_the_plain_loop_over_its_shards(algorithm, shards, data_dir, one_device):
    assembly = assembly_of(experiment(data_dir, algorithm, train={"steps": 6}, eval={"every": 4}))
    taken = []
    outcome = BaselineRun(assembly, taken.append, threading.Event()).run()

    [mesh] = {mesh for mesh, _ in assembly.jobs()}
    program = assembly.program(mesh, shards)
    state, batches = program.state_from(assembly.initial_parameters()), assembly.batches(shards)
    tokens = []
    for step in range(6):
        batch = next(batches)
        tokens.append(int(batch["weights"].sum()))
        state, _ = program.step(state, batch, step)
    assert_equal(outcome.params, state.params)
    steps = [record for record in taken if isinstance(record, records.StepDone)]
    assert [(record.learner, record.step, record.tokens) for record in steps] == [
        (0, step + 1, tokens[step]) for step in range(6)
    ]
    evaluations = [record for record in taken if isinstance(record, records.Evaluated)]
    assert [(record.step, record.tokens) for record in evaluations] == [
        (step, sum(tokens[:step])) for step in (0, 4, 6)
    ]
    assert (outcome.step, outcome.finished, outcome.failure) == (6, True, None)
    assert outcome.eval_loss == evaluations[-1].loss


def test_a_stop_ends_a_baseline_at_a_step_boundary(data_dir, one_device):
    assembly = assembly_of(experiment(data_dir, "lone_learner", train={"steps": 1_000_000}))
    stop, taken = threading.Event(), []

    def record(one):
        taken.append(one)
        if isinstance(one, records.StepDone) and one.step == 3:
            stop.set()

    outcome = BaselineRun(assembly, record, stop).run()
    assert (outcome.finished, outcome.failure) == (False, None)
    assert outcome.step == max(one.step for one in taken if isinstance(one, records.StepDone))
    assert 3 <= outcome.step <= 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"train": {"batch_size": 3}},
            "config.train.batch_size: gives 3 rows, but must give a multiple of 4, the devices",
        ),
        (
            {"eval": {"batch_size": 6}, "train": {"batch_size": 4}},
            "config.eval.batch_size: gives 6 rows, but must give a multiple of 4, the devices",
        ),
        (
            {"train": {"batch_size": 4}, "inner": {"accumulation": 3}},
            "config.inner.accumulation: is 3, but a step has 4 rows, which is no multiple of it",
        ),
        ({"sync": {"num_fragments": 10_000}}, "config.sync.num_fragments: num_fragments is 10000, but"),
    ],
    ids=["rows", "held-out rows", "accumulation", "fragments"],
)
def test_what_does_not_fit_is_told_before_anything_is_compiled(changes, told, data_dir):
    with pytest.raises(ConfigError) as raised:
        assembly_of(experiment(data_dir, **changes)).check()
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(("algorithm", "least"), [("data_parallel", 9000.0), ("lone_learner", 0.0)])
def test_a_job_waits_for_the_slowest_of_its_learners(algorithm, least, data_dir, one_device, monkeypatch):
    slow = {"steps": 4, "min_step_seconds": (0.0, 10_000.0)}
    assembly = assembly_of(experiment(data_dir, algorithm, train=slow, eval={"every": None}))
    waited, stop = [], threading.Event()
    monkeypatch.setattr(stop, "wait", waited.append)
    assert BaselineRun(assembly, lambda record: None, stop).run().finished
    assert len(waited) == 4
    assert all(least <= seconds <= 10_000.0 * bool(least) for seconds in waited)


@pytest.mark.parametrize("changes", [{"eval": {"every": None}}, {"driver": "remote"}], ids=str)
def test_held_out_rows_are_nobodys_where_what_trains_scores_nothing(changes, data_dir):
    rows = {**changes.get("eval", {}), "batch_size": 6}
    assembly_of(experiment(data_dir, **{**changes, "eval": rows}, train={"batch_size": 4})).check()


def test_a_data_parallel_job_divides_its_rows_among_all_devices(data_dir):
    assembly = assembly_of(experiment(data_dir, "data_parallel", train={"batch_size": 2}))
    with pytest.raises(ConfigError, match="gives 4 rows, but must give a multiple of 8"):
        assembly.check()
    with devices(4):
        assembly.check()


def test_a_run_that_cannot_start_leaves_the_folder_of_an_earlier_one_alone(data_dir, tmp_path, one_device):
    (tmp_path / "summary.json").write_text("{}")
    unknown = experiment(data_dir, data={"name": "no_such_text"})
    with pytest.raises(DataError, match="no_such_text"):
        run_job(unknown, tmp_path, threading.Event())
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_earlier_runs_are_set_aside_one_by_one(tmp_path, capsys):
    for number in (1, 2):
        (tmp_path / "summary.json").write_text(f"{number}")
        (tmp_path / "learners").mkdir()
        set_aside(tmp_path)
        assert (tmp_path / "previous" / str(number) / "summary.json").read_text() == f"{number}"
    (tmp_path / "config.py").write_text("of the user's own")
    set_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.py", "previous"]
    assert sorted(path.name for path in (tmp_path / "previous").iterdir()) == ["1", "2"]
    assert capsys.readouterr().err.count("is now in") == 2
