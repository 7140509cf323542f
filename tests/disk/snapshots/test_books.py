"""The books of a virtual run add up to what its files and its summary hold."""

import json
import math

from ddiloco.disk.snapshots.books import Books
from ddiloco.goodput.accounting import State
from ddiloco.observe import records

STREAM = [
    records.Evaluated(0, 0, 0.0, 2.5, {"accuracy": 0.25}),
    records.StateChanged(0, State.STEPPING, 0.0, 2),
    records.StateChanged(3, State.STEPPING, 0.0, 2),
    records.StepDone(0, 1, 1.0, 10, {"loss": 1.0, "skipped": 0}),
    records.StepDone(3, 1, 1.5, 10, {"loss": 1.0, "skipped": 1.0}),
    records.StepDone(3, 2, 2.0, 10, {}),
    records.Transferred(0, 5, 7),
    records.Transferred(3, 1, 2),
    records.Noted("round", {"step": 1}, 2.0),
    records.Noted("round_skipped", {"step": 2}, 2.5),
    records.Noted("drop", {"learner": 3, "reason": "stale report"}, 2.5),
    records.Evaluated(1, 20, 3.0, math.nan),
]


def books(stream):
    taken = []
    kept = Books(taken.append)
    for record in stream:
        kept(record)
    assert taken == list(stream)
    return kept


def test_lines_and_figures_are_those_of_the_records():
    kept = books(STREAM)
    assert kept.lines() == {"steps": {"0": 1, "3": 2}, "rounds": 1, "states": 2}
    assert kept.summary() == {
        "bytes_sent": 6,
        "bytes_received": 9,
        "drops": {"stale report": 1},
        "inner_states": {},
        "eval_history": [
            {"step": 0, "tokens": 0, "seconds": 0.0, "loss": 2.5, "accuracy": 0.25},
            {"step": 1, "tokens": 20, "seconds": 3.0, "loss": None},
        ],
        "rounds_skipped": 1,
        "rounds_abandoned": 0,
        "skipped_steps": 1,
    }


def test_books_that_were_put_away_anywhere_go_on_as_if_they_had_not_been():
    expected = books(STREAM * 2)
    for cut in range(len(STREAM)):
        first = books(STREAM[:cut])
        second = Books(lambda record: None)
        second.resume(*(json.loads(json.dumps(told)) for told in (first.lines(), first.summary())))
        for record in (*STREAM[cut:], *STREAM):
            second(record)
        assert second.lines() == expected.lines()
        assert {**second.summary(), "eval_history": 0} == {**expected.summary(), "eval_history": 0}
        assert len(second.summary()["eval_history"]) == 4


def test_flags_of_many_steps_are_counted_without_being_kept():
    kept = books([records.StepDone(0, n, 1.0, 1, {"skipped": n % 2}) for n in range(5001)])
    assert kept.summary()["skipped_steps"] == 2500
