"""A run whose syncer died: what the next one writes counts from the beginning of the run."""

import dataclasses
import math

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.monitor import Monitor
from ddiloco.telemetry.records import (
    Alarm,
    Evaluated,
    LearnerDied,
    Noted,
    Resumed,
    RunInfo,
    StateChanged,
    StepDone,
    Transferred,
)
from ddiloco.telemetry.run_files import RunFiles
from tests.integration.remote_runs import lines

INFO = RunInfo("decoupled", 2, 1000, 2, 8, 0, {0: 1, 1: 1})


def monitor(workdir, *records, resume=False):
    """A monitor that has taken these records, and its summary."""
    one = Monitor(workdir, INFO, log_every=1, clock=None, resume=resume)
    for record in records:
        one.queue.put(record)
    return one.stop()


def merge(fragment, version, learners, time):
    values = {"step": version, "fragment": fragment, "version": version, "quorum": len(learners)}
    return Noted("round", {**values, "learners": learners, "tokens": 10, "grace_seconds": 0.5}, time)


def steps(learner, first, count, time):
    return [StepDone(learner, first + i, time + i, 10, {"loss": 1.0}) for i in range(count)]


FIRST = [
    StateChanged(0, State.STARTING, 100.0),
    StateChanged(1, State.STARTING, 100.0),
    StateChanged(0, State.STEPPING, 101.0),
    StateChanged(1, State.STEPPING, 101.0),
    *steps(0, 1, 3, 102.0),
    *steps(1, 1, 2, 102.0),
    Transferred(0, 100, 200),
    Noted("drop", {"learner": 0, "reason": "late"}, 103.0),
    Noted("records_lost", {"learner": 0, "count": 3}, 103.0),
    Noted("recovered", {"learner": 0, "inner_state": "fresh", "seconds": 0.25}, 103.0),
    merge(0, 1, [0, 1], 103.0),
    Noted("round_refused", {"step": 2, "fragment": 1, "left_out": [0]}, 103.2),
    Evaluated(1, 50, 103.5, 4.0, {"accuracy": 0.5}),
    LearnerDied(1, 103.9, "its traceback"),
    StateChanged(1, State.FAILED, 104.0),
]
THEN = [
    StateChanged(0, State.STARTING, 105.8),  # as whoever connects
    StateChanged(0, State.STEPPING, 105.9),
    *steps(0, 4, 2, 106.0),
    Transferred(0, 1, 2),
    Noted("drop", {"learner": 0, "reason": "late"}, 106.5),
    Noted("records_lost", {"learner": 0, "count": 2}, 106.5),
    Noted("recovered", {"learner": 1, "inner_state": "peer", "donor_step": 4}, 106.5),
    merge(1, 3, [0], 106.5),
    StateChanged(1, State.STEPPING, 107.0),
    *steps(1, 3, 1, 108.0),
    Evaluated(5, 90, 108.5, 3.0, {"accuracy": 0.75}),
]
CONTINUED = (
    "inner_steps",
    "tokens",
    "rounds",
    "outer_steps",
    "mean_quorum",
    "eval_history",
    "wall_seconds",
    "goodput",
    "uptime",
    "lost",
    "bytes_sent",
    "bytes_received",
    "bytes_sent_by_learner",
    "bytes_received_by_learner",
    "drops",
    "records_lost",
    "inner_states",
    "offers_left_out",
    "failures",
    "train_loss",
)


def test_two_processes_one_after_the_other_count_as_one(tmp_path):
    whole = monitor(tmp_path / "whole", *FIRST, *THEN)
    monitor(tmp_path / "parts", *FIRST)
    both = monitor(tmp_path / "parts", *THEN, resume=True)
    assert {name: both[name] for name in CONTINUED} == {name: whole[name] for name in CONTINUED}
    assert both["tokens"] == {"0": 50, "1": 30} and both["records_lost"] == 5
    assert both["goodput"] < 1


def test_of_the_skipped_steps_only_those_count_whose_lines_are_left(tmp_path):
    """As after a cut back to a snapshot: the steps that are taken again may be skipped again."""
    skipped = [StepDone(0, step, 101.0 + step, 10, {"loss": math.nan, "skipped": 1}) for step in (4, 5)]
    monitor(tmp_path, *FIRST, *skipped)
    path = tmp_path / "learners" / "0" / "steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    told = monitor(tmp_path, dataclasses.replace(skipped[1], time=120.0), resume=True)
    assert (told["skipped_steps"], told["inner_steps"]["0"]) == (2, 5)


def test_the_files_add_up_to_what_the_process_that_wrote_them_knew(tmp_path):
    contributions = [[m, 1, 2, step, 2, 20] for m, step in ((0, 4), (1, 2))]
    values = {"step": 4, "fragment": 1, "version": 4, "quorum": 2, "live": 2, "learners": [0, 1]}
    host = {"learner": 1, "host": 1, "hosts": 2}
    more = [
        Noted("round", {**values, "contributions": contributions, "quorum_seconds": 0.25}, 107.5),
        Noted("host_here", host, 107.6),
        Noted("host_gone", host, 108.6),
        StepDone(0, 6, 109.0, 10, {"loss": math.nan, "skipped": 1}),
        StepDone(1, 4, 121.0, 10, {"loss": math.inf}),
        StateChanged(0, State.FAILED, 130.0),
    ]
    one = Monitor(tmp_path, INFO, log_every=1, clock=None)
    for record in sorted((*FIRST, *THEN, *more), key=lambda record: getattr(record, "time", 0.0)):
        one.queue.put(record)
    one.stop()
    files = RunFiles(tmp_path)
    assert files.read()
    written, read = one._state, files.state
    for name in ("steps", "tokens", "clock", "starts", "stepped_at", "not_finite", "skips", "gaps", "stale"):
        assert [getattr(read.learners[m], name) for m in (0, 1)] == [
            getattr(written.learners[m], name) for m in (0, 1)
        ], name
    lanes = [
        [
            lane.spans(200.0, 99)
            for m in (0, 1)
            for lane in (s.learners[m].lane, *s.learners[m].hosts.values())
        ]
        for s in (read, written)
    ]
    assert lanes[0] == lanes[1] and len(lanes[0]) == 4
    for name in ("by_fragment", "quorums", "merged_tokens", "left_out", "seconds", "live"):
        assert getattr(read.rounds, name) == getattr(written.rounds, name), name
    assert [*read.rounds.recent] == [*written.rounds.recent]
    assert [*read.events] == [*written.events] and len(read.events) > 5
    for name in ("tokens", ("loss", 0), "rounds", "quorum", ("in", 1), "quorum_seconds"):
        assert read.slots.sums(name) == written.slots.sums(name), name
    for name in ("marks", "away", "finished"):
        assert getattr(read, name) == getattr(written, name), name
    states = lines(tmp_path / "states.jsonl")
    assert {"time": 103.9, "learner": 1, "state": "failed", "chips": None} in states
    recovered = lines(tmp_path / "recoveries.jsonl")[0]
    assert recovered == {"time": 103.0, "learner": 0, "inner_state": "fresh", "seconds": 0.25}


OUTAGE = [
    *(StateChanged(m, State.STEPPING, 100.0) for m in (0, 1)),
    *(step for m in (0, 1) for step in steps(m, 1, 10, 101.0)),
]


def test_who_is_not_back_after_an_outage_counts_as_dead_since_it_was_last_heard(tmp_path):
    monitor(tmp_path, *OUTAGE)
    told = monitor(tmp_path, StateChanged(0, State.STARTING, 210.0), resume=True)  # it had gone on
    assert told["lost"]["failed"] == pytest.approx(0.5 * 100 / 110)
    assert told["uptime"] == 1.0


def test_the_time_of_an_outage_is_lost_and_stays_so_in_every_later_process(tmp_path):
    back = [StateChanged(m, state, 210.0) for m in (0, 1) for state in (State.FAILED, State.STARTING)]
    back += [StateChanged(m, State.STEPPING, 210.0) for m in (0, 1)]
    monitor(tmp_path, *OUTAGE)
    told = monitor(tmp_path, *back, *steps(0, 11, 10, 211.0), *steps(1, 11, 10, 211.0), resume=True)
    assert told["goodput"] == told["uptime"] == pytest.approx(20 / 120)
    assert told["lost"]["failed"] == pytest.approx(100 / 120)
    again = monitor(tmp_path, *(StateChanged(m, State.STARTING, 220.0) for m in (0, 1)), resume=True)
    assert again["lost"] == told["lost"]


def test_a_learner_that_finished_has_not_failed_as_another_process_of_it_comes(tmp_path):
    monitor(tmp_path, *OUTAGE, StateChanged(0, State.FINISHED, 111.0))
    monitor(tmp_path, StateChanged(0, State.FAILED, 210.0), resume=True)
    assert [line["state"] for line in lines(tmp_path / "states.jsonl")][-1] == "finished"


@pytest.mark.parametrize("durable", [2, 3])
def test_merges_count_by_the_durable_versions_though_a_crash_took_their_lines_or_these_come_later(
    durable, tmp_path
):
    monitor(tmp_path, *FIRST)
    told = monitor(tmp_path, Resumed((1, durable), 105.0), *THEN, resume=True)
    assert (told["outer_steps"], told["rounds"]) == ({"0": 1, "1": 3}, 4)
    assert (told["mean_quorum"], told["mean_grace_seconds"]) == (1.5, 0.5)


def test_alarms_of_an_earlier_process_stay_and_are_not_shown_again(tmp_path, capsys):
    first, second = (Alarm(f"a call from 10.0.0.{n} was refused", 103.0) for n in (1, 2))
    monitor(tmp_path, *FIRST, first)
    shown = capsys.readouterr().err
    told = monitor(tmp_path, *THEN, second, resume=True)
    assert told["alarms"] == [first.sentence, second.sentence]
    assert (shown, capsys.readouterr().err) == (
        f"ddiloco: {first.sentence}\n",
        f"ddiloco: {second.sentence}\n",
    )
    again = monitor(tmp_path, first, resume=True)
    assert again["alarms"] == told["alarms"]
