"""The view of a run against its files, and against itself when it is read in parts."""

import dataclasses
import json
import shutil

from ddiloco.dashboard.view import read_views, view_of
from ddiloco.telemetry import run_files
from ddiloco.telemetry.run_files import RunFiles
from ddiloco.telemetry.state import RECENT_ROUNDS
from tests.integration.remote_runs import lines


def test_steps_tokens_and_clocks_are_those_of_the_files(run_of):
    workdir = run_of("third_speed")
    for one in read_views([workdir])[0].learners:
        steps = lines(workdir / "learners" / str(one.learner) / "steps.jsonl")
        assert one.clock == steps[-1]["step"] and one.tokens == sum(step["tokens"] for step in steps)
        assert one.step_seconds == (3.0 if one.learner == 3 else 1.0)


def test_rounds_and_fragments_are_those_of_the_files(run_of):
    workdir = run_of("steady")
    view, rounds = read_views([workdir])[0], lines(run_of("steady") / "rounds.jsonl")
    newest = {line["fragment"]: line["version"] for line in rounds}
    assert view.syncer.rounds == len(rounds) and view.syncer.mean_quorum == 4.0
    assert {one.fragment: one.version for one in view.fragments} == newest
    assert (view.rounds[0].step, view.rounds[0].version) == (rounds[-1]["step"], rounds[-1]["version"])
    assert max(one.age_steps for one in view.fragments) < 2 * view.setting("sync.interval")


def test_lanes_tell_the_lives_of_learners(view_of):
    view = view_of("lives")
    second = [(span.state, round(span.start)) for span in view.learners[2].lane if span.end > span.start]
    assert second == [("stepping", 0), ("dead", 50), ("recovering", 120), ("stepping", 150)]
    assert view.learners[1].state == "dead" and view.learners[2].starts == 2
    last = [[share for share in view.learners[m].merged if share is not None][-1] for m in (0, 1)]
    assert last == [1.0, 0.0]


def test_a_syncer_that_starts_again_starts_no_learner(run_of, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_of("lives"), workdir)
    before = [one.starts for one in read_views([workdir])[0].learners]
    told = lines(workdir / "states.jsonl")
    last = told[-1]["time"]
    here = {line["learner"] for line in told if line["time"] == last and line["state"] == "finished"}
    for moment in (20.0, 30.0, 40.0):  # before anybody dies
        told += [{**told[0], "time": moment, "learner": m, "state": "starting"} for m in here]
        told += [{**told[0], "time": moment, "learner": m, "state": "stepping"} for m in here]
    told.sort(key=lambda line: line["time"])
    (workdir / "states.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert here and [one.starts for one in read_views([workdir])[0].learners] == before


def test_staleness_is_what_a_learner_did_since_its_offer(view_of):
    view = view_of("busy_syncer")
    assert all(one.staleness is None or one.staleness > 2 for one in view.learners)
    assert all(one.staleness == 0 for one in view_of("steady").learners)


def test_losses_are_those_of_the_steps_and_one_that_is_nan_is_seen(view_of):
    view = view_of("nan")
    assert [one.not_finite for one in view.learners] == [False, True, False]
    ends = [next(loss for loss in reversed(one.loss) if loss is not None) for one in view.learners]
    assert all(loss < 6.0 for loss in ends)


def test_the_load_of_a_syncer_is_that_of_the_last_rounds(run_of, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_of("steady"), workdir)
    measured = {"merge_seconds": 0.25, "disk_seconds": 0.125, "inbox": 3, "merging": 1}
    rounds = [{**line, **measured} for line in lines(workdir / "rounds.jsonl")]
    (workdir / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    load, last = read_views([workdir])[0].syncer, rounds[-RECENT_ROUNDS:]
    span, moved = last[-1]["time"] - last[0]["time"], last[-1]["bytes_sent"] - last[0]["bytes_sent"]
    assert load.busy == 0.375 * (len(last) - 1) / span
    assert (load.merge_seconds, load.disk_seconds, load.inbox, load.merging) == (0.25, 0.125, 3, 1)
    assert load.in_per_second == moved / span > 0


def test_hosts_of_a_learner_have_lanes_of_their_own(view_of):
    first, second, third = view_of("missing_host").learners[2].hosts
    assert [(span.state, span.start, span.end) for span in third.lane] == [
        ("connected", 1.0, 100.0),
        ("gone", 100.0, 120.0),
        ("connected", 120.0, 150.0),
        ("gone", 150.0, 200.0),
    ]
    assert (third.state, third.state_seconds) == ("gone", 50.0)
    assert [at.state for at in (first, second)] == ["connected"] * 2
    assert not view_of("missing_host").learners[1].hosts


def test_hosts_of_a_learner_finish_with_it(run_of, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_of("steady"), workdir)
    told = [("host_here", 0, 5.0), ("host_here", 1, 6.0), ("host_gone", 0, 301.0), ("host_gone", 1, 250.0)]
    with (workdir / "events.jsonl").open("a") as file:
        for event, host, time in told:
            line = {"time": time, "event": event, "learner": 2, "host": host, "hosts": 3}
            file.write(json.dumps(line) + "\n")
    lanes = [
        [(span.state, span.start) for span in at.lane] for at in read_views([workdir])[0].learners[2].hosts
    ]
    assert lanes[0] == [("connected", 5.0), ("finished", 300.0)]
    assert lanes[1] == [("gone", 5.0), ("connected", 6.0), ("gone", 250.0), ("finished", 300.0)]
    assert lanes[2] == [("gone", 5.0), ("finished", 300.0)]


def test_hosts_that_connect_before_their_learner_has_a_line_are_seen_by_an_open_page(tmp_path, run_of):
    workdir = tmp_path / "run"
    shutil.copytree(run_of("steady"), workdir)
    files = RunFiles(workdir)
    assert files.read()
    line = {"time": 400.0, "event": "host_here", "learner": 9, "host": 1, "hosts": 2}
    with (workdir / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert files.read()
    assert sorted(files.state.learners[9].hosts) == [0, 1]


def test_a_history_read_while_the_files_grow_is_that_of_the_whole_files(run_of, tmp_path):
    source, target = run_of("lives"), tmp_path / "lives"
    shutil.copytree(source, target)
    whole = {path: path.read_text().splitlines(keepends=True) for path in target.rglob("*.jsonl")}
    files = RunFiles(target)
    for moment in (60.0, 130.0, 210.0, 400.0):
        for path, text in whole.items():  # the same file, of the same inode
            path.write_text("".join(line for line in text if json.loads(line)["time"] <= moment))
        files.read()
    while not files.read():
        pass
    parts, at_once = view_of(files), read_views([source])[0]
    for name in ("fragments", "rounds", "tokens_per_second", "quorum", "events"):
        assert getattr(parts, name) == getattr(at_once, name), name
    for one, other in zip(parts.learners, at_once.learners, strict=True):
        assert dataclasses.replace(one, staleness=None) == dataclasses.replace(other, staleness=None)


def test_another_run_in_the_same_folder_is_read_anew(run_of, tmp_path):
    target = tmp_path / "run"
    shutil.copytree(run_of("lives"), target)
    files = RunFiles(target)
    files.read()
    shutil.rmtree(target)
    shutil.copytree(run_of("all_links_thin"), target)
    while not files.read():
        pass
    assert view_of(files).learners == read_views([run_of("all_links_thin")])[0].learners


def going_on(workdir, target, monkeypatch):
    """A copy of the run as if it was not over."""
    shutil.copytree(workdir, target)
    summary = json.loads((target / "summary.json").read_text())
    for name in ("driver", "finished", "interrupted"):
        summary.pop(name)
    (target / "summary.json").write_text(json.dumps(summary))
    (target / "states.jsonl").write_text(
        "".join(
            f"{json.dumps(line)}\n" for line in lines(target / "states.jsonl") if line["state"] != "finished"
        )
    )
    monkeypatch.setattr(run_files, "ALIVE", 1e9)
    return target


def test_a_learner_that_stands_still_while_the_run_goes_on_has_hung(run_of, tmp_path, monkeypatch):
    target = going_on(run_of("steady"), tmp_path / "run", monkeypatch)
    steps = target / "learners" / "2" / "steps.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:200]))
    view = read_views([target])[0]
    assert view.status == "running"
    assert [one.state for one in view.learners] == ["stepping", "stepping", "hung", "stepping"]
    assert view.learners[2].state_seconds == 100.0 and view.learners[2].lane[-1].state == "hung"


def test_a_learner_that_hung_until_it_was_killed_has_hung_on_its_lane_too(run_of, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_of("hang"), workdir)
    with (workdir / "states.jsonl").open("a") as file:
        file.write(json.dumps({"time": 190.0, "learner": 2, "state": "failed", "chips": 1}) + "\n")
    lane = read_views([workdir])[0].learners[2].lane
    told = [(span.state, round(span.start), round(span.end)) for span in lane if span.end > span.start]
    assert told == [("stepping", 0, 99), ("hung", 99, 190), ("dead", 190, 200)]
