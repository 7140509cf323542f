"""What the monitor shows a person while a run goes on."""

import itertools

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.records import Noted, StateChanged
from tests.telemetry.event_files import scalars
from tests.telemetry.monitor_script import SUMMARY, put, scripted, step


@pytest.mark.parametrize(("virtual", "elapsed"), [(True, "virtual 0:10"), (False, "0:10")])
def test_the_last_line_of_a_healthy_run_says_that_all_learners_are_alive(
    virtual, elapsed, make, tmp_path, capsys
):
    clock = itertools.chain([0.0], itertools.repeat(10.0))
    monitor = make(clock=None if virtual else clock.__next__)
    for learner in (0, 1):
        states = (State.STEPPING, 0.0), (State.FINISHED, 10.0)
        put(monitor, *(StateChanged(learner, state, time) for state, time in states))
        put(monitor, step(learner, 4, 10.0, loss=1.5))
    monitor.stop()
    assert capsys.readouterr().out == f"step 4/4  loss 1.500  alive 2/2  {elapsed}  goodput 100.0%\n"
    assert scalars(tmp_path / "run/metrics/global")["run/alive"] == [(4, 2.0)]


def test_comings_and_goings_are_told_unless_a_learner_had_finished(make, capsys):
    monitor = make()
    put(monitor, Noted("learner_ready", {"learner": 0}, 0.0))
    for name in ("learner_silent", "learner_returned", "learner_lost", "learner_ready"):
        put(monitor, Noted(name, {"learner": 0, "reason": "killed"}, 1.0))
    put(monitor, StateChanged(1, State.STEPPING, 1.0), StateChanged(1, State.FINISHED, 2.0))
    for name in ("learner_silent", "learner_lost"):
        put(monitor, Noted(name, {"learner": 1, "reason": "left"}, 3.0))
    monitor.stop()
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "learner 0 is silent; the others continue",
        "learner 0 sends messages again",
        "learner 0 lost: killed",
        "learner 0 is back",
    ]


def test_ci_is_quiet_but_for_evaluations_and_problems(make, monkeypatch, terminal, capsys):
    monkeypatch.setenv("CI", "true")
    screen, monitor = terminal(), make()
    put(monitor, *scripted(), Noted("learner_ready", {"learner": 1}, 20.0))
    monitor.stop()
    starts = [line.split(":")[0] for line in screen.getvalue().splitlines()]
    assert starts == ["step 0", "learner 1 died", "step 4"]
    assert capsys.readouterr().err == f"ddiloco: {SUMMARY['alarms'][0]}\n"


def test_a_stdout_that_was_closed_ends_nothing(make, terminal):
    screen = terminal()
    monitor = make()
    screen.close()
    put(monitor, *scripted())
    summary = monitor.stop({"params_sha256": "abc"})
    assert summary["step"] == 4
    starts = [alarm.split(":")[0] for alarm in summary["alarms"]]
    assert starts == ["the terminal", "an evaluation failed at step 2"]
