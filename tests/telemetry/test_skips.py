"""When skipped steps are an alarm, and when they end a run."""

import math

import pytest

from ddiloco.telemetry.records import Alarm, LearnerDied, Noted, StepDone
from ddiloco.telemetry.watches import MIN_STEPS, SkipWatch


@pytest.fixture
def watch(run_info):
    """A watch that has ended what `ended` says, and the alarms that came of the steps told to it."""

    class Told:
        def __init__(self, learners=2, interval=20, total_steps=1000, **info):
            self.ended, self.alarms = [], []
            described = run_info(learners, total_steps=total_steps, **info)
            self.watch = SkipWatch(described, interval, self.ended.append)
            self.record = self.watch.watching(
                lambda one: self.alarms.append(one.sentence) if isinstance(one, Alarm) else None
            )

        def steps(self, learner, pattern, first=1):
            """Takes steps: `x` is one that is skipped."""
            for step, kind in enumerate(pattern, first):
                metrics = {"loss": math.nan, "skipped": 1} if kind == "x" else {"loss": 1.0, "skipped": 0}
                self.record(StepDone(learner, step, float(step), 10, metrics))

    return Told


def test_more_than_a_tenth_of_an_interval_is_an_alarm_and_a_tenth_is_none(watch):
    told = watch()
    told.steps(0, "xx" + 18 * "." + "xx" + 18 * ".")
    assert told.alarms == []
    told.steps(1, "x...x..x..")
    assert told.alarms == ["learner 1: skips steps, from step 1 on 3 of 8, as loss or gradient is not finite"]
    told.steps(1, "xxx", first=11)
    assert len(told.alarms) == 1, "it is told once"
    assert not told.ended


def test_it_is_told_again_once_a_learner_has_got_over_it(watch):
    told = watch()
    told.steps(0, "xxx" + 20 * "." + "xxx")
    assert [alarm.split(",")[1] for alarm in told.alarms] == [
        " from step 1 on 3 of 3",
        " from step 24 on 3 of 20",
    ]


def test_a_run_of_which_all_learners_skip_nearly_all_steps_ends_once_and_says_since_when(watch):
    told = watch()
    told.steps(0, ".." + 18 * "x")
    assert not told.ended, "the other one may be well"
    told.steps(1, "." + 18 * "x")
    assert not told.ended, "an interval is not over"
    told.steps(1, "xx", first=20)
    [failure] = told.ended
    assert failure == told.watch.failure == told.alarms[-1]
    assert failure.startswith(
        "from step 2 on every learner skips nearly all steps, as loss or gradient is not"
    )
    assert "inner.learning_rate" in failure and "inner.warmup_steps" in failure and "\n" not in failure


def test_as_long_as_one_learner_learns_the_run_goes_on(watch):
    told = watch(learners=3)
    told.record(Noted("learner_ready", {"learner": 2}, 0.0))
    told.steps(0, 40 * "x")
    told.steps(1, 40 * "x")
    assert not told.ended, "the third has yet to take its first step"
    told.steps(2, 13 * "xx.")
    assert not told.ended


@pytest.mark.parametrize(
    "gone", [Noted("learner_lost", {"learner": 2}, 9.0), Noted("learner_silent", {"learner": 2}, 9.0)]
)
def test_who_is_gone_is_not_counted(gone, watch):
    told = watch(learners=3)
    told.steps(2, 20 * ".")
    told.steps(0, 20 * "x")
    told.steps(1, 20 * "x")
    assert not told.ended
    told.record(gone)
    told.steps(1, "x", first=21)
    assert told.ended


def test_no_single_learner_ends_a_run_of_several(watch):
    told = watch(learners=2)
    told.steps(1, 20 * ".")
    told.record(LearnerDied(1, 9.0, "killed"))
    told.steps(0, 100 * "x")
    assert told.alarms and not told.ended


def test_a_run_of_one_learner_and_a_baseline_end_by_themselves(watch):
    for told in (watch(learners=1), watch(learners=4, num_fragments=0)):
        told.steps(0, 20 * "x")
        assert told.ended and "the run skips" in told.ended[0]


@pytest.mark.parametrize(("interval", "total", "needed"), [(1, 100, MIN_STEPS), (50, 100, 50), (24, 6, 6)])
def test_how_many_steps_end_a_run(interval, total, needed, watch):
    """Of short intervals several; of a run that is shorter, all of its steps."""
    told = watch(learners=1, interval=interval, total_steps=total)
    told.steps(0, (needed - 1) * "x")
    assert not told.ended
    told.steps(0, "x", first=needed)
    assert told.ended
