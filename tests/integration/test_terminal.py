"""A terminal that closes under a run: SIGHUP for all in its foreground, and an error for each write."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.integration.hand import LOOP
from tests.integration.programs import LIMIT, ROOT
from tests.remote.ends import until

LONG = (LOOP, "--config.train.steps=1000000", "--config.eval.every=None")
PACED = "--config.train.min_step_seconds=(0.05, 0.05)"
SLOW = pytest.mark.slow
DRIVERS = {
    "local": (*LONG, PACED, "--config.driver=local"),
    "remote": (*LONG, PACED, "--config.driver=remote"),
    "virtual": (*LONG, "--config.driver=virtual"),
}


@pytest.fixture
def in_terminal(programs):
    """Starts a program as the leader of a terminal's session; gives its process and the other end."""
    started = []

    def start(*command, output=None):
        shown, terminal = pty.openpty()
        line = ["setsid", "--ctty", *command]
        streams = {"stdin": terminal} | dict.fromkeys(("stdout", "stderr"), output or terminal)
        started.append(subprocess.Popen(line, cwd=ROOT, env=programs.environment, **streams))
        os.close(terminal)
        return started[-1], shown

    yield start
    for process in started:
        process.kill()
        process.wait()


def close(process, shown):
    """The terminal closes: its leader hears of that, and then, as from a shell, all in the foreground."""
    os.close(shown)
    os.killpg(process.pid, signal.SIGHUP)


def begun(workdir, process):
    def merged():
        assert process.poll() is None
        path = workdir / "rounds.jsonl"
        return path.exists() and path.stat().st_size

    until(merged, "a merge", LIMIT)


@SLOW
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_run_whose_terminal_closes_saves_all_and_leaves(driver, in_terminal, programs, tmp_path):
    settings = [*DRIVERS[driver], f"--workdir={tmp_path}"]
    process, shown = in_terminal(sys.executable, "-m", "experiments.train", *settings)
    begun(tmp_path, process)
    close(process, shown)
    assert process.wait(LIMIT) == 129
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["interrupted"], summary["failures"]) == (True, [])
    [saved] = (tmp_path / "checkpoints").iterdir()
    assert int(saved.name) > 0


@SLOW
@pytest.mark.parametrize("driver", ["remote", "local"])
def test_with_nohup_a_run_outlives_its_terminal(driver, in_terminal, programs, tmp_path):
    settings = [*DRIVERS[driver], f"--workdir={tmp_path}"]
    command = ["nohup", sys.executable, "-m", "experiments.train", *settings]
    with open(tmp_path / "nohup.out", "w") as output:
        process, shown = in_terminal(*command, output=output)
    begun(tmp_path, process)
    close(process, shown)
    rounds = tmp_path / "rounds.jsonl"
    size = rounds.stat().st_size
    until(lambda: process.poll() is not None or rounds.stat().st_size > size, "a later merge", LIMIT)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 143
    assert any((tmp_path / "checkpoints").iterdir())
