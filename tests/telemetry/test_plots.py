"""`loss.png` of runs with little or odd to draw."""

import math

import pytest
from matplotlib import image

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.plots import plot_loss
from ddiloco.telemetry.records import Evaluated, Noted, StateChanged, StepDone
from ddiloco.telemetry.state import RunState


def only_nan(state):
    for step in range(1, 5):
        state.apply(StepDone(0, step, step, 10, {"loss": math.nan}))
    state.evaluations += [Evaluated(0, 0, 0.0, math.nan), Evaluated(4, 40, 4.0, math.inf)]


def everything(state):
    for step in range(1, 300):
        for learner in range(2):
            loss = math.nan if step == 50 else 5.0 / step
            state.apply(StepDone(learner, step, step, 10, {"loss": loss}))
        if step == 100:
            state.apply(StateChanged(1, State.STEPPING, 100.0))
            state.apply(StateChanged(1, State.FAILED, 100.0))
        if step == 200:
            state.apply(Noted("learner_ready", {"learner": 1}, 200.0))
    state.evaluations += [Evaluated(step, step, step, 5.0 - step / 100) for step in (0, 100, 200)]


@pytest.mark.parametrize(("learners", "feed"), [(1, only_nan), (12, everything)])
def test_any_run_gives_a_figure_and_leaves_no_other_file(tmp_path, run_info, learners, feed):
    state = RunState(run_info(learners), None)
    feed(state)
    path = tmp_path / "folder" / "loss.png"
    plot_loss(path, state)
    pixels = image.imread(path)
    assert pixels.shape[:2] == (832, 1440)
    assert pixels[..., :3].min() < 0.5
    assert list(path.parent.iterdir()) == [path]


def test_a_figure_that_cannot_be_written_leaves_no_half_of_it(tmp_path, run_info):
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(OSError):
        plot_loss(tmp_path / "loss.png", RunState(run_info(1), None))
    assert list(tmp_path.iterdir()) == [tmp_path / "loss.png"]
