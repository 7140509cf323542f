"""Lines as JSON: one object each, whoever prints and however."""

import io
import json
import sys

from ddiloco.telemetry.json_lines import JsonLines, about, speak_json
from ddiloco.telemetry.records import Noted, StepDone


def said(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_an_object_however_it_is_written():
    stream = io.StringIO()
    lines = JsonLines(stream, {"run": "mine", "role": "learner", "learner": 2})
    lines.write("connected to ")
    assert said(stream) == []
    print('the syncer\n\nand "welcome"', file=lines, flush=True)
    found = said(stream)
    assert [one["message"] for one in found] == ["connected to the syncer", 'and "welcome"']
    assert all(list(one) == ["time", "run", "role", "learner", "message"] for one in found)


def test_what_a_line_is_about_goes_with_it_and_not_with_the_next():
    stream = io.StringIO()
    lines = JsonLines(stream, {"role": "syncer"})
    with about(learner=3, round=None):
        print("it is silent", file=lines)
    print("all is well", file=lines)
    assert [one.get("learner") for one in said(stream)] == [3, None] and "round" not in said(stream)[0]


def test_the_lines_of_a_run_say_which_learner_and_which_round(make, monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    speak_json(run="mine", role="all", learner=None)
    monitor = make(3)
    values = {"step": 8, "fragment": 1, "version": 1, "quorum": 2, "learners": [0, 2], "tokens": 640}
    monitor.queue.put(Noted("round", values, 1.0))
    monitor.queue.put(Noted("learner_lost", {"learner": 1, "reason": "killed"}, 2.0))
    monitor.queue.put(StepDone(2, 9, 3.0, 10, {"loss": float("nan")}))
    monitor.stop()
    [lost] = [one for one in said(out) if "lost" in one["message"]]
    assert {name: lost[name] for name in ("run", "role", "learner", "round")} == {
        "run": "mine",
        "role": "all",
        "learner": 1,
        "round": 1,
    }
    [alarm] = said(err)
    assert (alarm["learner"], alarm["stream"]) == (2, "stderr") and "the loss is nan" in alarm["message"]
