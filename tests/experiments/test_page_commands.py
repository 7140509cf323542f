"""The page and the report as commands, from a run that is over."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from ddiloco.dashboard.exposition import exposition
from ddiloco.dashboard.view import read_views
from experiments.cli.workdirs import runs_in
from tests.integration.programs import ROOT
from tests.refusals import assert_refused


def leave(folder, seed):
    """A run that left next to nothing."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"seed": seed, "driver": "local"}))
    (folder / "summary.json").write_text(json.dumps({"num_learners": 2, "finished": True, "goodput": 1.0}))


@pytest.fixture
def sweep(tmp_path):
    """A folder of two runs."""
    for seed in (0, 1):
        leave(tmp_path / "sweep" / f"seed={seed}", seed)
    return tmp_path / "sweep"


def test_the_dashboard_shows_all_runs_of_a_sweep_until_it_is_ended(sweep):
    command = [sys.executable, "-m", "experiments.dashboard", f"--workdir={sweep}", "--listen=127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", program.stderr.readline())[0]
        page = httpx.get(url, trust_env=False, timeout=30.0).text
    finally:
        program.send_signal(signal.SIGINT)
    assert program.wait(30) == 0
    assert "run seed=0" in page and "run seed=1" in page and "Settings that differ" in page


def test_an_address_that_cannot_be_served_is_told_with_its_flag(sweep, programs):
    done = programs.run("dashboard", f"--workdir={sweep}", "--listen=0.0.0.0:7071")
    assert_refused(done, "listen: 0.0.0.0:7071 can be reached from other machines, which needs --token_file ")


def test_the_report_is_written_beside_the_run(sweep, programs):
    done = programs.run("report", f"--workdir={sweep / 'seed=0'}", f"--compare={sweep / 'seed=1'}")
    report = sweep / "seed=0" / "report.html"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{report}\n", "")
    assert "Runs side by side" in report.read_text()


def test_rows_of_a_comparison_are_found_in_its_folder_and_told_apart(tmp_path):
    """Each has its runs in folders that are called seed=0, seed=1."""
    for row in ("decoupled", "diloco"):
        leave(tmp_path / "compare" / row / "seed=0", 0)
    [*runs] = runs_in([tmp_path / "compare"])
    views = read_views(runs)
    assert [view.name for view in views] == ["decoupled/seed=0", "diloco/seed=0"]
    text = exposition(views)[0].decode()
    for row in ("decoupled", "diloco"):
        assert text.count(f'ddiloco_learner_state{{learner="1",run="{row}/seed=0",state="absent"}}') == 1


@pytest.mark.parametrize("arguments", [["--workdir={}/nothing"], []])
def test_a_folder_without_runs_is_a_usage_error_of_one_line(sweep, arguments, programs):
    assert_refused(programs.run("report", *(argument.format(sweep) for argument in arguments)), "workdir: ")
