"""The page and the report as commands, from a run that is over."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from ddiloco.page.exposition import exposition
from ddiloco.page.view import read_views
from experiments.front.workdirs import runs_in
from tests.integration.programs import ROOT


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


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, **pipes)


def test_the_dashboard_shows_all_runs_of_a_sweep_until_it_is_ended(sweep):
    program = start("experiments.dashboard", f"--workdir={sweep}", "--listen=127.0.0.1:0")
    try:
        url = re.search(r"http://\S+", program.stdout.readline())[0]
        page = httpx.get(url, trust_env=False, timeout=30.0).text
    finally:
        program.send_signal(signal.SIGINT)
    assert program.wait(30) == 0
    assert "run seed=0" in page and "run seed=1" in page and "Settings that differ" in page


@pytest.mark.parametrize(
    ("address", "told"),
    {
        "0.0.0.0:7071": "0.0.0.0:7071 can be reached from other machines, which needs --token_file or --tls",
        "7071": "is '7071', but must be HOST:PORT",
        "": "is missing; give --listen=...",
    }.items(),
)
def test_an_address_that_cannot_be_served_is_told_with_its_flag(address, told, sweep):
    program = start("experiments.dashboard", f"--workdir={sweep}", f"--listen={address}")
    assert program.communicate(timeout=60)[0] == f"error: listen: {told}\n"
    assert program.returncode == 2


def test_the_report_is_written_beside_the_run(sweep):
    program = start("experiments.report", f"--workdir={sweep / 'seed=0'}", f"--compare={sweep / 'seed=1'}")
    told, _ = program.communicate(timeout=60)
    report = sweep / "seed=0" / "report.html"
    assert (program.returncode, told) == (0, f"{report}\n")
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


def test_a_report_that_cannot_be_written_is_an_error_of_one_line(sweep):
    program = start("experiments.report", f"--workdir={sweep / 'seed=0'}", f"--output={__file__}/report.html")
    told, _ = program.communicate(timeout=60)
    assert (program.returncode, told.count("\n")) == (2, 1) and told.startswith("error: output: ")


@pytest.mark.parametrize("arguments", [["--workdir={}/nothing"], []])
def test_a_folder_without_runs_is_a_usage_error_of_one_line(sweep, arguments):
    program = start("experiments.report", *(argument.format(sweep) for argument in arguments))
    told, _ = program.communicate(timeout=60)
    assert program.returncode == 2 and told.startswith("error: workdir: ") and told.count("\n") == 1
