"""TensorBoard's event files: which scalars, against which steps."""

import jax.numpy as jnp
import pytest

from ddiloco.telemetry.alarms import Alarms
from ddiloco.telemetry.files import GrowingFiles
from ddiloco.telemetry.records import Noted, StepDone
from ddiloco.telemetry.writers import EventFiles, Metrics
from tests.telemetry.event_files import read, scalars


@pytest.fixture
def write(tmp_path):
    """Takes (method, arguments) and returns the folder of the files."""

    def write(*calls, log_every=1):
        files = GrowingFiles(tmp_path, Alarms(pytest.fail))
        metrics = Metrics([EventFiles(files)], log_every)
        for method, *arguments in calls:
            getattr(metrics, method)(*arguments)
        files.close()
        return tmp_path / "metrics"

    return write


def step(learner, number, time, tokens=10, **metrics):
    return "step", StepDone(learner, number, time, tokens, metrics)


def test_a_learners_scalars_stand_under_the_same_tags_in_a_run_of_its_own(write):
    folder = write(
        step(0, 1, 5.0, loss=jnp.float32(2.5), grad_norm=0.5, learning_rate=0.25, skipped=0, max_load=1.5),
        step(1, 1, 5.0, loss=3.5),
    )
    assert sorted(path.name for path in folder.iterdir()) == ["learner_0", "learner_1"]
    assert scalars(folder / "learner_0") == {
        "train/loss": [(1, 2.5)],
        "train/max_load": [(1, 1.5)],
        "train/grad_norm": [(1, 0.5)],
        "train/learning_rate": [(1, 0.25)],
    }
    assert scalars(folder / "learner_1") == {"train/loss": [(1, 3.5)]}
    assert [event.wall_time for event in read(folder / "learner_0")] == [5.0]


def test_the_first_step_and_every_nth_are_written_with_the_rate_of_all_steps_between(write):
    steps = [step(0, n, 2.0 * n, tokens=n, loss=float(n)) for n in range(1, 9)]
    written = scalars(write(*steps, log_every=3) / "learner_0")
    assert written["train/loss"] == [(1, 1.0), (3, 3.0), (6, 6.0)]
    assert written["train/tokens_per_second"] == [(3, (2 + 3) / 4), (6, (4 + 5 + 6) / 6)]


def test_a_round_is_written_against_its_step_and_names_are_left_out(write):
    values = {
        "step": 24,
        "fragment": 3,
        "version": 7,
        "quorum": 2,
        "learners": (0, 1),
        "live": 4,
        "tokens": 99,
        "quorum_seconds": 0.5,
        "grace_seconds": 0.25,
        "sync_seconds": 1.5,
        "outer_gradient_norm": jnp.float32(4.5),
        "cosine": 0.125,
    }
    written = scalars(write(("round", Noted("round", values, 1.0))) / "global")
    assert written == {
        "round/quorum": [(24, 2.0)],
        "round/quorum_seconds": [(24, 0.5)],
        "round/grace_seconds": [(24, 0.25)],
        "round/sync_seconds": [(24, 1.5)],
        "outer/outer_gradient_norm": [(24, 4.5)],
        "outer/cosine": [(24, 0.125)],
    }
