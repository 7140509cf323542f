"""The monitor's thread, fed as a run feeds it: what it writes, shows, and survives."""

import json
import math
import threading
import time

import jax.numpy as jnp
import pytest

from ddiloco.goodput.accounting import State
from ddiloco.protocol.policy import MAX_AGE, TOO_OLD
from ddiloco.telemetry import monitor as monitor_module
from ddiloco.telemetry.monitor import FLUSH_EVERY, POLL
from ddiloco.telemetry.records import Evaluated, Flush, Noted, StateChanged, Transferred, write_out
from tests.integration.remote_runs import lines, steps_of
from tests.remote.ends import until
from tests.telemetry.event_files import scalars
from tests.telemetry.monitor_script import SUMMARY, TRACEBACK, put, scripted, step


def test_a_scripted_run_gives_exactly_its_summary_and_files(make, tmp_path):
    monitor, workdir = make(), tmp_path / "run"
    monitor.start()
    put(monitor, *scripted())
    summary = monitor.stop({"params_sha256": "abc"})
    assert summary == SUMMARY
    assert json.loads((workdir / "summary.json").read_text()) == SUMMARY
    assert steps_of(workdir, 1) == [
        {"time": 12.5, "step": 1, "tokens": 50, "loss": 5.0},
        {"time": 15.0, "step": 2, "tokens": 0, "loss": None, "skipped": 1},
    ]
    assert (workdir / "learners/1/traceback.txt").read_text() == f"died at 15.0\n{TRACEBACK}\n"
    written = scalars(workdir / "metrics" / "global")
    assert written["eval/loss"] == [(0, 6.0), (4, 1.25)]
    assert written["run/goodput"] == [(4, 0.625)]
    assert written["run/mfu"] == [(4, 0.25)]
    events = lines(workdir / "events.jsonl")
    assert [(line["event"], line["time"]) for line in events] == [("died", 15.0), ("alarm", 19.0)]
    left = ["events.jsonl", "learners", "metrics", "rounds.jsonl", "states.jsonl", "summary.json"]
    assert sorted(path.name for path in workdir.iterdir()) == left


VALUES = {"step": 8, "fragment": 1, "version": 2, "quorum": 2, "learners": [0, 2], "tokens": 640}


def test_every_merge_and_nothing_else_has_a_line_in_order_with_time_and_values(make, tmp_path):
    monitor = make(3)
    put(monitor, Noted("round", VALUES, 4.5), Transferred(1, sent=30, received=70))
    for name in ("round_skipped", "round_abandoned", "learner_lost", "drop"):
        put(monitor, Noted(name, {"step": 4, "fragment": 0, "learner": 0, "reason": "died"}, 5.0))
    put(monitor, Noted("round", {**VALUES, "version": 3, "learners": [1], "cosine": 0.5}, 6.25))
    monitor.stop()
    assert lines(tmp_path / "run" / "rounds.jsonl") == [
        {"time": 4.5, **VALUES, "bytes_sent": 0, "bytes_received": 0},
        {"time": 6.25, **VALUES, "version": 3, "learners": [1], "cosine": 0.5}
        | {"bytes_sent": 30, "bytes_received": 70},
    ]


def test_a_learner_whose_clock_is_wrong_or_that_lies_spoils_no_figure(make, tmp_path):
    now = [1000.0]
    monitor = make(clock=lambda: now[0])
    now[0] = 1010.0
    put(monitor, StateChanged(0, State.STEPPING, 1002.0), StateChanged(0, State.FINISHED, 1010.0))
    put(monitor, StateChanged(1, State.STEPPING, 9e10), step(1, 1 << 52, 0.0), step(1, 2, 1e9))
    monitor.start()
    summary = monitor.stop()
    assert (summary["step"], summary["goodput"]) == (4, 1.0)
    assert summary["wall_seconds"] == 10.0
    assert [line["time"] for line in steps_of(tmp_path / "run", 1)] == [1000.0, 1010.0]
    assert summary["alarms"] == ["the clock of learner 1 is wrong: 90000000000"]


def test_a_learner_that_hurries_all_others_is_an_alarm(make):
    monitor = make()
    put(monitor, *(Noted("clock_ahead", {"learner": 1, "speed": speed}, 1.0) for speed in (11.8, 9.0)))
    monitor.start()
    [alarm] = monitor.stop()["alarms"]
    assert alarm.startswith("learner 1: its clock goes 12 times as fast as others step; with a sync.quorum")


def test_work_that_is_overwritten_for_its_age_is_an_alarm_that_names_the_learner_and_its_link(make):
    monitor = make()
    put(monitor, *(Noted("drop", {"learner": learner, "reason": TOO_OLD}, 1.0) for learner in (1, 1)))
    put(monitor, Noted("round_refused", {"step": 1, "fragment": 0, "left_out": [0]}, 1.0))
    put(monitor, Noted("drop", {"learner": 0, "reason": TOO_OLD}, 1.0))
    monitor.start()
    summary = monitor.stop()
    lost = f"unmerged work is overwritten, over {MAX_AGE} versions old"
    assert summary["alarms"] == [
        f"learner 1: {lost}: its link to the syncer is too slow",
        f"learner 0: {lost}: the guard leaves out its offers",
    ]
    assert summary["work_overwritten"] == {"0": 1, "1": 2}


def test_records_of_many_threads_all_arrive_and_each_threads_in_order(make, tmp_path):
    monitor, count = make(learners=4, clock=time.time), 100
    monitor.start()

    def learn(learner):
        put(monitor, StateChanged(learner, State.STEPPING, time.time()))
        for number in range(1, count + 1):
            put(monitor, step(learner, number, time.time(), tokens=learner + number, loss=1.0))
            put(monitor, Transferred(learner, 1, 2))
        put(monitor, StateChanged(learner, State.FINISHED, time.time()))

    threads = [threading.Thread(target=learn, args=(learner,)) for learner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = monitor.stop()
    for learner in range(4):
        written = steps_of(tmp_path / "run", learner)
        assert [line["step"] for line in written] == list(range(1, count + 1))
        assert [line["tokens"] for line in written] == [learner + n for n in range(1, count + 1)]
        assert summary["tokens"][str(learner)] == sum(line["tokens"] for line in written)
    assert (summary["bytes_sent"], summary["bytes_received"]) == (4 * count, 8 * count)
    assert summary["inner_steps"] == dict.fromkeys("0123", count)
    assert (summary["alarms"], summary["finished"], summary["goodput"]) == ([], False, 1.0)


def test_steps_reach_the_disk_within_a_second_though_nothing_follows_them(make, tmp_path):
    assert FLUSH_EVERY + POLL < 1.0
    monitor, path = make(), tmp_path / "run/learners/0/steps.jsonl"
    monitor.start()
    put(monitor, step(0, 1), step(0, 2))
    until(path.exists)
    until(lambda: path.read_bytes().count(b"\n") == 2)


@pytest.mark.parametrize("ending", [False, True])
def test_whoever_waits_for_a_flush_finds_all_that_was_recorded_before(ending, make, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_module, "FLUSH_EVERY", 1e9 if ending else 0.1)
    monitor, path, found = make(), tmp_path / "run/learners/0/steps.jsonl", []
    monitor.start()
    put(monitor, step(0, 1), step(0, 2), Flush(lambda: found.append(path.read_bytes().count(b"\n"))))
    if ending:
        monitor.stop()
    until(lambda: found)
    assert found == [2]


def test_the_summary_counts_what_was_recorded_before_a_flush_that_asks_for_it(make, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_module, "SUMMARY_EVERY", 1e9)
    monitor = make()
    monitor.start()
    put(monitor, step(0, 1), step(0, 2))
    write_out(monitor.queue.put, 60.0)
    assert not (tmp_path / "run/summary.json").exists()
    write_out(monitor.queue.put, 60.0, summary=True)
    assert json.loads((tmp_path / "run/summary.json").read_text())["inner_steps"]["0"] == 2


def test_nan_becomes_null_and_one_alarm_for_each_learner(make, tmp_path, capsys):
    monitor = make()
    put(monitor, StateChanged(0, State.STEPPING, 0.0))
    put(monitor, *(step(0, number, loss=jnp.float32(jnp.nan)) for number in (1, 2, 3)))
    put(monitor, step(1, 1, loss=math.inf), Evaluated(3, 30, 3.0, math.nan))
    summary = monitor.stop()
    assert summary["train_loss"] is None and summary["eval_loss"] is None
    assert summary["eval_history"] == [{"step": 3, "tokens": 30, "seconds": 3.0, "loss": None}]
    alarms = [
        "learner 0: the loss is nan at step 1",
        "learner 1: the loss is inf at step 1",
        "held-out loss is nan from step 3 on: the global model is spoilt, or its data are",
    ]
    assert summary["alarms"] == alarms
    assert capsys.readouterr().err == "".join(f"ddiloco: {alarm}\n" for alarm in alarms)
    text = (tmp_path / "run/summary.json").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_record_that_cannot_be_used_is_an_alarm_and_the_next_one_is_used(make):
    monitor = make()
    put(monitor, object(), step(0, 1, loss="high"), Noted("round", {"fragment": 0}, 1.0))
    put(monitor, step(0, 2, loss=2.0))
    summary = monitor.stop()
    assert summary["train_loss"] == 2.0
    starts = [alarm.split(" was")[0] for alarm in summary["alarms"]]
    assert starts == ["a object record", "a StepDone record", "a Noted record"]


def test_a_workdir_that_cannot_be_written_ends_nothing(make, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    monitor = make(workdir=tmp_path / "file")
    monitor.start()
    put(monitor, *scripted())
    summary = monitor.stop({"params_sha256": "abc"})
    places = [str(tmp_path / "file" / name) for name in ("", "summary.json")]
    own = SUMMARY["alarms"]
    assert sorted(alarm.split(": ")[0] for alarm in summary["alarms"] if alarm not in own) == sorted(places)
    assert {**summary, "alarms": own} == SUMMARY
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(f"ddiloco: {a}" for a in summary["alarms"])


def test_steps_are_complete_once_a_full_disk_has_room_again(make, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_module, "FLUSH_EVERY", 0.01)
    folder = tmp_path / "run/learners/0"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    monitor, confirmed, answered = make(), threading.Event(), threading.Event()
    monitor.start()
    put(monitor, *(step(0, number) for number in range(1, 10)))
    put(monitor, Flush(confirmed.set), Flush(answered.set, summary=True))
    until(answered.is_set)
    assert not confirmed.is_set(), "these steps may be what led to a snapshot"
    folder.unlink()
    put(monitor, step(0, 10))
    until(confirmed.is_set)
    summary = monitor.stop()
    assert [line["step"] for line in steps_of(tmp_path / "run", 0)] == list(range(1, 11))
    assert len(summary["alarms"]) == 1


def test_a_writer_that_fails_in_an_unforeseen_way_keeps_nothing_else_from_being_written(make, monkeypatch):
    def plot(path, state):
        raise RuntimeError("no font")

    monkeypatch.setattr(monitor_module, "plot_loss", plot)
    monitor = make()
    put(monitor, *scripted())
    alarms = [*SUMMARY["alarms"], "the monitor's plot: RuntimeError: no font"]
    assert monitor.stop({"params_sha256": "abc"}) == {**SUMMARY, "alarms": alarms}


def test_stopping_is_bounded_when_the_disk_hangs(make, monkeypatch):
    hangs, go_on = threading.Event(), threading.Event()

    def write(path, summary):
        hangs.set()
        assert go_on.wait(30)

    monkeypatch.setattr(monitor_module, "write_json", write)
    monitor = make()
    put(monitor, *scripted())
    monitor.start()
    summary = monitor.stop(timeout=0.05)
    told = "the monitor did not end within 0.05 seconds; the summary may be incomplete"
    assert summary["alarms"][-1] == told
    assert hangs.wait(30)
    go_on.set()
    assert monitor.stop()["rounds"] == SUMMARY["rounds"]
