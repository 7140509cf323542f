"""The files of a run cut back to a snapshot: what was before it counts once, what came after not at all."""

import contextlib
import json
import pathlib
import re
import tracemalloc

import pytest

from ddiloco.telemetry import trimming
from ddiloco.telemetry.files import GrowingFile
from ddiloco.telemetry.trimming import Cut, trim


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    """Learner 0 takes a step each second from time 1 on, learner 1 each two; a merge each four."""
    workdir = tmp_path / "run"
    for m in (0, 1):
        steps = [{"time": float(i * (m + 1)), "step": i, "tokens": 10} for i in range(1, 11)]
        write(workdir / "learners" / str(m) / "steps.jsonl", steps)
    for name in ("0/state.0.70", "1/state.0.77", "1/state.1.77"):
        (workdir / "learners" / name).write_text("of a later step")
    rounds = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    lines = [{"time": 4.0 * i, "fragment": p, "version": v} for i, (v, p) in enumerate(rounds, 1)]
    write(workdir / "rounds.jsonl", lines)
    states = [(0.0, 0, "stepping"), (0.0, 1, "stepping"), (9.0, 0, "failed"), (15.0, 1, "failed")]
    write(
        workdir / "states.jsonl",
        [{"time": t, "learner": m, "state": s, "chips": None} for t, m, s in states],
    )
    scores = [{"step": step, "loss": 1.0, "tokens": 0, "seconds": 0.0} for step in (0, 8, 16)]
    (workdir / "summary.json").write_text(
        json.dumps({"bytes_sent": 7, "eval_history": scores, "alarms": ["an alarm"]})
    )
    for name in ("config.json", "loss.png"):
        (workdir / name).write_text("{}")
    (workdir / "checkpoints").mkdir()
    (workdir / "snapshots").mkdir()
    return workdir


def test_every_file_of_a_run_that_the_docs_name_is_known_here():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "workdir.md").read_text()
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    named = {name.partition("/")[0] for cell in cells for name in re.findall("`([^`]+)`", cell)}
    assert len(named) > 18 and named <= trimming.OF_RUNS | trimming.OWNERS


CUT = Cut(time=8.0, versions=(1, 1), step=8, states={0: (10, 8.5), 1: (4, 8.5)})


def test_each_learner_keeps_the_steps_before_its_own_cut_and_those_it_had_started(run):
    trim(run, CUT)
    assert [line["step"] for line in read(run / "learners/0/steps.jsonl")] == [*range(1, 9), 9, 10]
    assert [line["step"] for line in read(run / "learners/1/steps.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("steps", "cut", "left"),
    [
        ([(11.0, 1), (12.0, 2), (3.0, 3), (4.0, 4)], (2, 2.5), 2),
        ([(1.0, 1), (2.0, 2), (3.0, 9), (4.0, 10)], (5, 2.5), 2),
        ([(1.0, 5), (2.0, 6), (3.0, 5), (4.0, 6), (5.0, 7), (6.0, 5), (7.0, 6)], (6, 4.1), 4),
    ],
    ids=["a time that was set back", "a clock that jumped over the state's", "steps that were taken twice"],
)
def test_steps_are_cut_by_the_learners_clock(steps, cut, left, run):
    write(run / "learners/0/steps.jsonl", [{"time": t, "step": step, "tokens": 10} for t, step in steps])
    trim(run, Cut(time=8.0, versions=(1, 1), step=8, states={0: cut}))
    assert [(line["time"], line["step"]) for line in read(run / "learners/0/steps.jsonl")] == steps[:left]


def test_files_of_weeks_are_cut_without_being_held(run):
    lines = [{"time": float(t), "step": t, "tokens": 10} for t in range(1, 12_001)]
    write(run / "learners/0/steps.jsonl", lines)
    tracemalloc.start()
    try:
        trim(run, Cut(time=8.0, versions=(1, 1), step=8, states={0: (9_000, 9_000.5)}))
        with contextlib.closing(GrowingFile(run / "learners/0/steps.jsonl")) as file:
            file.append(b'{"step": 9001}\n')
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept, gone = (run / folder / "learners/0/steps.jsonl" for folder in (".", "previous/1"))
    assert [*read(kept), *read(gone)] == [*lines[:9_000], {"step": 9_001}, *lines[9_000:]]
    assert held < kept.stat().st_size / 4


def test_all_other_files_are_cut_too_and_what_is_cut_off_and_made_anew_is_kept_aside(run):
    target = trim(run, CUT)
    assert [(line["fragment"], line["version"]) for line in read(run / "rounds.jsonl")] == [(0, 1), (1, 1)]
    told = [(line["time"], line["learner"], line["state"]) for line in read(run / "states.jsonl")]
    assert told[2:] == [(8.5, 0, "failed"), (8.5, 1, "failed")], "learners are down from their cuts on"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["bytes_sent"], summary["alarms"]) == (7, [])
    assert [score["step"] for score in summary["eval_history"]] == [0, 8]
    assert target == run / "previous" / "1"
    assert {path.name for path in target.iterdir()} == {
        "learners", "rounds.jsonl", "states.jsonl", "summary.json", "config.json", "loss.png", "checkpoints",
    }  # fmt: skip
    for later in ("0/state.0.70", "1/state.0.77", "1/state.1.77"):
        assert (target / "learners" / later).exists()
        assert not (run / "learners" / later).exists()
    assert len(read(target / "learners/1/steps.jsonl")) == 6
    assert (run / "snapshots").is_dir()


def test_a_kill_on_the_way_loses_no_counts(run, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trimming, "_split", killed)
        trim(run, CUT)
    trim(run, CUT)
    assert json.loads((run / "summary.json").read_text())["bytes_sent"] == 7


def test_a_second_time_changes_nothing_more(run):
    trim(run, CUT)
    files = [path for path in run.rglob("*.json*") if "previous" not in path.parts]
    before = {path: path.read_text() for path in files}
    trim(run, CUT)
    assert {path: path.read_text() for path in files} == before


def test_a_line_that_a_crash_has_torn_is_no_hindrance(run):
    with (run / "learners/1/steps.jsonl").open("a") as file:
        file.write('{"time": 2')
    trim(run, CUT)
    assert len(read(run / "learners/1/steps.jsonl")) == 4
