"""Where curves go beside TensorBoard: services that are optional, may be slow, and may fail."""

import json
import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.telemetry import writers
from ddiloco.telemetry.records import Evaluated, StepDone
from ddiloco.telemetry.writers import Aside, check_writers

TIMEOUT = 30.0


class Memory:
    """A writer that keeps what it is given; it begins with a word of the test's."""

    def __init__(self, begin=None, fails=False):
        assert begin is None or begin.wait(TIMEOUT)
        self.points, self.closed, self._fails = [], False, fails

    def write(self, *point):
        if self._fails:
            raise ConnectionError("no route to host")
        self.points.append(point)

    def close(self):
        self.closed = True


def point(number):
    return ("learner_1", number, 2.0 * number, {"train/loss": 1.0})


def test_points_come_in_order_and_the_end_after_them():
    memory, told = Memory(), []
    aside = Aside(lambda: memory, told.append, "service")
    for number in range(5):
        aside.write(*point(number))
    aside.close()
    assert memory.points == [point(number) for number in range(5)] and memory.closed and told == []


def test_nobody_waits_for_a_slow_service_and_that_points_are_lost_is_told_once(monkeypatch):
    monkeypatch.setattr(writers, "MAX_WAITING", 3)
    begin, told, made = threading.Event(), [], []
    aside = Aside(lambda: made.append(Memory(begin)) or made[0], told.append, "service")
    for number in range(10):
        aside.write(*point(number))
    begin.set()
    aside.close()
    assert made[0].points == [point(number) for number in range(3)]
    assert told == ["service is too slow: points of its curves are given up"]


def test_a_service_that_fails_is_told_and_left_alone():
    told = []
    aside = Aside(lambda: Memory(fails=True), told.append, "service")
    for number in range(10):
        aside.write(*point(number))
    aside.close()
    assert told == ["service: ConnectionError: no route to host; nothing more is written to it"]


def test_a_writer_whose_package_is_missing_is_told_before_anything_begins(monkeypatch):
    monkeypatch.setitem(writers.NEEDS, "wandb", "no_such_package")
    check_writers(("tensorboard",))
    with pytest.raises(ConfigError, match=r"config\.log.writers: wandb needs the package no_such_package"):
        check_writers(("tensorboard", "wandb"))


@pytest.fixture
def run(make, tmp_path):
    """Writes some curves through a monitor with this writer, and returns the summary's alarms."""

    def run(name):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"seed": 7}))
        monitor = make(3, writers=("tensorboard", name))
        for step in range(1, 4):
            monitor.queue.put(StepDone(2, step, float(step), 10, {"loss": 1.0 / step}))
        monitor.queue.put(Evaluated(3, 30, 4.0, float("nan"), {"accuracy": 0.5}))
        return monitor.stop()["alarms"]

    return run


def test_mlflow_has_the_curves_without_a_server(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert run("mlflow") == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(writers.PROJECT)
    [made] = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(made.info.run_id, "learner_2/train/loss")
    assert [(one.step, one.value, one.timestamp) for one in losses] == [
        (1, 1.0, 1000),
        (2, 0.5, 2000),
        (3, 1 / 3, 3000),
    ]
    assert made.data.metrics["global/eval/accuracy"] == 0.5 and "global/eval/loss" not in made.data.metrics
    assert (made.info.status, made.info.run_name) == ("FINISHED", "run")


def test_weights_and_biases_has_the_curves_offline(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run("wandb") == []
    [written] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    data = written.read_bytes()
    for name in ("learner_2/train/loss", "global/eval/accuracy", "learner_2/step", "seed"):
        assert name.encode() in data
