"""Learners and syncer as processes: what a run leaves, a learner killed in the middle, refusals by hand."""

import itertools
import json
import os
import pathlib
import signal
import socket
import time

import pytest

from ddiloco.launch.ports import reserved_port
from tests.integration.programs import LIMIT, SMALLEST
from tests.remote.ends import alive, until

STEADY = ("--config.eval.every=0", "--config.sample.tokens=0", "--config.sync.quorum=None")
UNENDING = ("--config.train.steps=1000000", *STEADY[:2])


def lines(path):
    """The complete lines of a file that grows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def steps_of(workdir, learner):
    return lines(workdir / "learners" / str(learner) / "steps.jsonl")


def processes_of(parent):
    """By learner number or role: the processes that a parent has started, through its fork server."""
    found, parents = {}, {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if name.startswith(("learner ", "syncer")):
            found[name.removeprefix("learner "), int(path.name)] = parents[int(path.name)]
    return {name: pid for (name, pid), server in found.items() if parents.get(server) == parent.pid}


def answers(address):
    """Whether something listens at HOST:PORT."""
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture
def address():
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def started(programs):
    """Starts programs, and ends those that are left."""
    made = []

    def start(*arguments):
        made.append(programs.start(*arguments))
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_killed_learner_is_back_within_the_run_and_the_other_has_stepped_on(programs, started, tmp_path):
    changes = ["--config.driver=remote", *UNENDING]
    process = started("train", *programs.training(tmp_path), *changes)

    def wait_for(condition, told):
        def look():
            assert process.poll() is None, process.communicate()
            return condition()

        until(look, told, LIMIT)

    wait_for(lambda: all(len(steps_of(tmp_path, m)) > 20 for m in (0, 1)), "twenty steps of both")
    before = processes_of(process)
    assert sorted(before) == ["0", "1", "syncer"]
    os.kill(before["0"], signal.SIGKILL)
    killed_at = time.time()
    rounds = tmp_path / "rounds.jsonl"
    wait_for(
        lambda: any(r["time"] > killed_at and r["learners"] == [1] for r in lines(rounds)), "a merge of 1"
    )
    wait_for(lambda: steps_of(tmp_path, 0)[-1]["time"] > killed_at + 0.5, "a step of another process")
    back = time.time()
    wait_for(lambda: any(r["time"] > back and 0 in r["learners"] for r in lines(rounds)), "a merge with 0")
    after = processes_of(process)
    assert after["0"] != before["0"]
    assert (after["1"], after["syncer"]) == (before["1"], before["syncer"])
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process)
    assert done.returncode == 143
    told = "the process of learner 0 was killed by SIGKILL; another is started in 0.25 s\n"
    assert done.stderr == told
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["driver"], summary["interrupted"], summary["failures"]) == ("remote", True, [])
    for learner in (0, 1):
        taken = steps_of(tmp_path, learner)
        assert summary["inner_steps"][str(learner)] == len(taken)
        assert summary["tokens"][str(learner)] == sum(line["tokens"] for line in taken)
    longest = [
        max(b["time"] - a["time"] for a, b in itertools.pairwise(steps_of(tmp_path, m))) for m in (0, 1)
    ]
    assert longest[1] < longest[0]
    assert 0 < summary["lost"]["failed"] < 1
    assert summary["inner_states"] == {"fresh": 2, "peer": 1}
    assert [(r["learner"], r["inner_state"]) for r in lines(tmp_path / "recoveries.jsonl")[2:]] == [
        (0, "peer")
    ]
    positions = json.loads((tmp_path / "syncer" / "positions.json").read_text())
    drawn = {learner: json.loads(position)["batches"] for learner, position in positions.items()}
    for learner in (0, 1):  # steps under way as the process was killed are taken again, and no others
        assert 0 <= summary["inner_steps"][str(learner)] - drawn[str(learner)] <= 64
    assert not any(map(alive, after.values()))


def test_a_killed_syncer_goes_on_from_what_it_had_committed_and_no_learner_waited(
    programs, started, tmp_path
):
    process = started("train", *programs.training(tmp_path), "--config.driver=remote", *UNENDING)
    rounds = tmp_path / "rounds.jsonl"

    def wait_for(condition, told):
        def look():
            assert process.poll() is None, process.communicate()
            return condition()

        until(look, told, LIMIT)

    wait_for(lambda: len(lines(rounds)) > 12, "twelve rounds")
    before = processes_of(process)
    os.kill(before["syncer"], signal.SIGKILL)
    killed_at = time.time()
    committed = {r["fragment"]: (r["version"], r["step"]) for r in lines(rounds)}
    merged_anew = lambda: [r for r in lines(rounds) if r["time"] > killed_at]  # noqa: E731
    wait_for(lambda: {r["fragment"] for r in merged_anew()} == {0, 1, 2}, "a merge of each fragment")
    after = processes_of(process)
    assert after["syncer"] != before["syncer"]
    assert {after[m] == before[m] for m in "01"} == {True}
    for fragment, (version, step) in committed.items():
        first = next(r for r in merged_anew() if r["fragment"] == fragment)
        assert first["version"] > version and first["step"] > step, "what was committed is not merged again"
    versions = [r["version"] for r in lines(rounds) if r["fragment"] == 0]
    assert len(versions) == len(set(versions)), "no version is made twice"
    wait_for(lambda: any({0, 1} == set(r["learners"]) for r in merged_anew()), "both learners in a merge")
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process)
    assert done.returncode == 143
    assert not any(map(alive, after.values()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    last = {str(p): max(r["version"] for r in lines(rounds) if r["fragment"] == p) for p in range(3)}
    assert summary["outer_steps"] == last, "the counts are those of the whole run"
    for learner in (0, 1):
        assert summary["inner_steps"][str(learner)] == len(steps_of(tmp_path, learner))
    assert summary["uptime"] == 1.0


def test_where_all_are_waited_for_processes_come_to_the_parameters_of_threads(programs, tmp_path):
    diloco = ["--config=configs/dense.py:diloco", "--config.sync.num_fragments=1", *STEADY]
    hashes = []
    for driver in ("local", "remote"):
        changes = [*diloco, f"--config.driver={driver}", "--config.train.min_step_seconds=()"]
        done = programs.train(tmp_path / driver, *changes)
        assert (done.returncode, done.stderr) == (0, "")
        summary = json.loads((tmp_path / driver / "summary.json").read_text())
        assert (summary["finished"], summary["inner_steps"]) == (True, {"0": 12, "1": 12})
        hashes.append((summary["params_sha256"], summary["eval_loss"], summary["bytes_sent"]))
    assert hashes[0] == hashes[1]
    # A syncer killed after its learners have left: the next one saves what was merged, and waits for nobody.
    workdir = tmp_path / "remote"
    changes = [*programs.training(workdir), *diloco, "--config.train.min_step_seconds=()"]
    (workdir / "summary.json").unlink()
    done = programs.run("syncer", *changes, "--listen=127.0.0.1:0", "--resume", "--finish")
    assert (done.returncode, done.stderr) == (0, "")
    again = json.loads((workdir / "summary.json").read_text())
    assert (again["finished"], again["params_sha256"]) == (True, hashes[1][0])
    assert again["inner_steps"] == {"0": 12, "1": 12}


def test_roles_started_by_hand_refuse_who_does_not_fit_in_one_line(programs, address, started, tmp_path):
    for name in ("ours", "other"):
        (tmp_path / name).write_text(f"the token that is {name}\n")
    settings = [*SMALLEST, f"--config.data.data_dir={programs.data_dir}", *UNENDING]
    ours = f"--token_file={tmp_path / 'ours'}"
    where = [f"--workdir={tmp_path / 'run'}", f"--listen={address}"]
    syncer = started("syncer", *settings, ours, *where)
    until(lambda: answers(address), "the syncer to listen", LIMIT)
    asked = [*settings, f"--syncer={address}", "--learner_id=1"]
    wrong = {
        "asks for another join token": started("learner", *asked, f"--token_file={tmp_path / 'other'}"),
        "the layouts' fingerprints differ": started("learner", *asked, ours, "--config.model.mlp_dim=48"),
        "config.sync, train.steps or outer.codec is not the syncer's": started(
            "learner", *asked, ours, "--config.sync.interval=5"
        ),
    }
    for told, learner in wrong.items():
        done = programs.finish(learner)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: syncer: {address} refused learner 1: ")
        assert done.stderr.endswith(f"{told}\n")
        assert done.stderr.count("\n") == 1
    syncer.send_signal(signal.SIGTERM)
    assert programs.finish(syncer).returncode == 143


def test_what_the_roles_cannot_do_is_told_in_one_line(programs):
    wrong = {
        "syncer --listen=0.0.0.0:7070": "listen: 0.0.0.0:7070 can be reached from other machines, ",
        "syncer --listen=7070": "listen: is '7070', but must be HOST:PORT",
        "learner --learner_id=4": "learner_id: is 4, but must be below config.sync.num_learners, 4",
        "train --config=configs/dense.py:lone_learner --config.driver=remote": "config.driver: is remote, ",
    }
    running = {told: programs.start(*command.split()) for command, told in wrong.items()}
    for told, process in running.items():
        done = programs.finish(process)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: {told}")
