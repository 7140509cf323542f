"""`rounds.jsonl`: a line a merge, in order, with all that the protocol says of it."""

import pytest

from ddiloco.telemetry.records import Noted, Transferred
from tests.integration.remote_runs import lines

VALUES = {"step": 8, "fragment": 1, "version": 2, "quorum": 2, "learners": [0, 2], "tokens": 640}


def note(monitor, name, time, **values):
    monitor.queue.put(Noted(name, values, time))


@pytest.fixture
def workdir(tmp_path, no_figure):
    return tmp_path / "run"


def test_every_merge_has_a_line_in_order_with_time_and_values(make, workdir):
    monitor = make(3)
    note(monitor, "round", 4.5, **VALUES)
    monitor.queue.put(Transferred(1, sent=30, received=70))
    note(monitor, "round", 6.25, **{**VALUES, "version": 3, "learners": [1]}, cosine=0.5)
    monitor.stop()
    assert lines(workdir / "rounds.jsonl") == [
        {"time": 4.5, **VALUES, "bytes_sent": 0, "bytes_received": 0},
        {"time": 6.25, **VALUES, "version": 3, "learners": [1], "cosine": 0.5}
        | {"bytes_sent": 30, "bytes_received": 70},
    ]


def test_only_merges_have_lines(make, workdir):
    monitor = make(3)
    for name in ("round_skipped", "round_abandoned", "learner_lost", "drop"):
        note(monitor, name, 1.0, step=4, fragment=0, learner=0, reason="died")
    monitor.stop()
    assert not (workdir / "rounds.jsonl").exists()
