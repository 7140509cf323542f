"""Training as a process: what it leaves behind, how it is interrupted, and that its checkpoint is enough."""

import json
import math
import re
import shutil
import signal

import pytest

from ddiloco.outer.codecs import GROUP
from ddiloco.protocol.schedule import Schedule
from ddiloco.storage.checkpoints import restore
from ddiloco.telemetry.trimming import OWNERS
from tests.integration.remote_runs import steps_of, summary_of
from tests.refusals import assert_refused


def newest(folder):
    """The newest checkpoint: of the last round, which is not always at the last step."""
    return max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def workdir(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    done = programs.train(folder, "--config.sample.tokens=8")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"{folder}/summary.json" in done.stdout
    assert "sample: def " in done.stdout
    return folder


def test_the_summary_agrees_with_itself_and_with_what_the_learners_wrote(workdir):
    summary = summary_of(workdir)
    assert (summary["algorithm"], summary["num_learners"], summary["num_params"]) == ("decoupled", 2, 10656)
    assert (summary["finished"], summary["interrupted"], summary["failures"]) == (True, False, [])
    assert summary["alarms"] == []
    assert sum(summary["outer_steps"].values()) == summary["rounds"]
    due = sum(len(Schedule(3, 4, 12).due(t)) for t in range(1, 13))
    assert summary["rounds"] + summary["rounds_skipped"] + summary["rounds_abandoned"] == due
    assert summary["rounds"] >= 3
    for learner in ("0", "1"):
        lines = steps_of(workdir, learner)
        assert summary["tokens"][learner] == sum(line["tokens"] for line in lines)
        assert summary["inner_steps"][learner] == len(lines)
        assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
        assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert max(line["step"] for learner in "01" for line in steps_of(workdir, learner)) == 12
    assert 1 <= summary["min_quorum"] <= summary["mean_quorum"] <= summary["max_quorum"] <= 2
    assert 0 < summary["goodput"] <= 1
    assert 0 < summary["uptime"] <= 1
    assert summary["learner_blocked_seconds"] == 0
    welcomes = 2 * summary["num_params"] * 4
    each = summary["num_params"] * (4 + 32 / GROUP) / 8 * summary["rounds"] / 3  # in int4
    assert welcomes + 0.5 * each < summary["bytes_received"] < welcomes + 3 * each
    assert summary["eval_history"][0]["step"] == 0
    assert summary["eval_history"][-1]["loss"] == summary["eval_loss"]
    assert summary["eval_loss"] < summary["eval_history"][0]["loss"]
    assert 0 < summary["train_loss"] < 2 * math.log(259)
    assert re.fullmatch("[0-9a-f]{64}", summary["params_sha256"])


def test_everything_a_run_makes_lies_under_its_workdir(workdir):
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (workdir / "sample.txt").read_text().startswith("def ")
    assert list((workdir / "metrics").rglob("*tfevents*"))
    config = json.loads((workdir / "config.json").read_text())
    assert (config["algorithm"], config["sync"]["num_fragments"]) == ("decoupled", 3)
    checkpoint = restore(workdir / "checkpoints")
    assert 4 <= checkpoint.step <= 12
    assert checkpoint.eval_loss == summary_of(workdir)["eval_loss"]


def test_a_checkpoint_alone_gives_the_same_loss(programs, workdir, tmp_path):
    step = newest(workdir / "checkpoints").name
    shutil.copytree(workdir / "checkpoints" / step, tmp_path / step)
    done = programs.run("evaluate", f"--checkpoint={tmp_path / step}", f"--output={tmp_path / 'result.json'}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    expected = summary_of(workdir)["eval_loss"]
    assert result["step"] == int(step)
    assert result["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert result["eval_loss_in_training"] == expected
    assert done.stdout.startswith(f"step {step}: {result['eval_loss']:.6f} nats/token")


def test_a_corrupt_checkpoint_is_a_usage_error_of_one_line(programs, workdir, tmp_path):
    shutil.copytree(workdir / "checkpoints", tmp_path / "checkpoints")
    damaged = newest(tmp_path / "checkpoints")
    for path in (damaged / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\0" * path.stat().st_size)
    done = programs.run("evaluate", f"--checkpoint={tmp_path / 'checkpoints'}")
    assert_refused(done, f"checkpoint: {damaged}: cannot be read: ")


@pytest.mark.parametrize(
    ("number", "code", "algorithm", "said"),
    [
        (
            signal.SIGINT,
            130,
            "decoupled",
            ["saving model and summary in {}; a second Ctrl-C ends this at once, unsaved"],
        ),
        pytest.param(signal.SIGTERM, 143, "lone_learner", [], marks=pytest.mark.slow),
    ],
    ids=["SIGINT", "SIGTERM to a baseline"],
)
def test_a_signal_in_mid_run_saves_everything_and_leaves(number, code, algorithm, said, programs, tmp_path):
    changes = ["--config.train.steps=1000000", "--config.eval.every=0", "--config.sample.tokens=0"]
    arguments = [f"--config=configs/dense.py:{algorithm}", *programs.training(tmp_path), *changes]
    process = programs.start("train", *arguments)
    done = programs.interrupt(process, tmp_path / "learners" / "0" / "steps.jsonl", number)
    # A busy machine may leave one learner no time, of which there is an alarm.
    told = [line for line in done.stderr.splitlines() if "of its work is merged" not in line]
    assert (done.returncode, told) == (code, [line.format(tmp_path) for line in said])
    summary = summary_of(tmp_path)
    assert (summary["interrupted"], summary["finished"], summary["failures"]) == (True, False, [])
    for learner in summary["inner_steps"]:
        lines = steps_of(tmp_path, learner)
        assert summary["inner_steps"][learner] == len(lines)
        assert summary["tokens"][learner] == sum(line["tokens"] for line in lines)
    assert f"\nended early, at step {summary['step']}: held-out loss " in f"\n{done.stdout}"
    checkpoint = restore(tmp_path / "checkpoints")
    assert checkpoint.eval_loss == summary["eval_loss"]
    assert (tmp_path / "loss.png").exists()


def test_a_second_run_in_the_same_workdir_sets_the_first_aside(programs, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    timed = ("--config.driver=virtual", "--config.virtual.arrays=False", "--config.train.min_step_seconds=()")
    done = programs.train(tmp_path / "run", *timed)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"the earlier run in {tmp_path / 'run'} is now in {tmp_path / 'run/previous/1'}\n"
    assert summary_of(tmp_path / "run" / "previous" / "1") == summary_of(workdir)
    assert not (tmp_path / "run" / "sample.txt").exists()
    made = {path.name for path in workdir.iterdir()} - OWNERS
    assert {path.name for path in (tmp_path / "run/previous/1").iterdir()} == made
