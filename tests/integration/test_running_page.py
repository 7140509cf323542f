"""Every command of docs/running.md runs here as far as it can, or its command line is read to its end."""

import os
import pathlib
import re
import shlex
import subprocess

import pytest

from tests.integration.programs import ROOT
from tests.launch.recorded import Commands

PAGE = ROOT / "docs" / "running.md"
ENGINES = ("docker", "kubectl")


def commands():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def of_program(name):
    return [c for c in commands() if f"experiments.{name} " in c]


def words_of(command, runs):
    """The program of a command and its arguments, with its files in the test's folder."""
    words = shlex.split(command.replace("runs/", f"{runs}/"))
    at = words.index("-m")
    return words[at + 1].removeprefix("experiments."), words[at + 2 :]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the tokens and certificates that the page makes."""
    folder = tmp_path_factory.mktemp("runs")
    for command in [*of_program("make_tokens"), *(c for c in commands() if "make_certs" in c)]:
        subprocess.run(
            command.replace("runs/", f"{folder}/"), shell=True, cwd=ROOT, check=True, capture_output=True
        )
    return folder


def test_every_command_is_tested():
    known = ("train", "make_tokens", "launch", "syncer", "learner", "evaluator", "control", "links")
    for command in commands():
        engine = command.split()[0] in ENGINES or command.startswith("scripts/make_certs.sh")
        assert engine or any(f"experiments.{name} " in command for name in known), command


@pytest.mark.parametrize("command", [c for c in of_program("launch") if "--dry_run" in c])
def test_a_launcher_writes_what_the_page_names(command, runs, programs):
    name, arguments = words_of(command, runs)
    done = programs.run(name, *arguments, "--config.model.num_layers=1")
    assert done.returncode == 0, done.stderr
    folder = next(word for word in arguments if word.startswith("--output=")).removeprefix("--output=")
    made = {path.name for path in pathlib.Path(folder).iterdir()}
    assert made
    named = re.findall(rf"runs/{pathlib.Path(folder).name}/([\w.]+)", PAGE.read_text())
    assert set(named) <= made


@pytest.mark.parametrize("program", ["syncer", "learner", "evaluator", "train"])
def test_its_command_line_is_read_to_its_end(program, runs, programs):
    for command in of_program(program):
        name, arguments = words_of(command, runs)
        done = programs.run(name, *arguments, "--config.train.steps=0")
        assert (done.returncode, done.stderr.partition(",")[0]) == (
            2,
            "error: config.train.steps: is 0",
        ), command


@pytest.mark.parametrize(
    "command", [*of_program("control"), *(c for c in of_program("links") if "--syncer" in c)]
)
def test_management_asks_the_syncer_that_it_names(command, runs, programs):
    name, arguments = words_of(re.sub(r"[a-z-]+:7070", "localhost:1", command), runs)
    done = programs.run(name, *arguments, *(["--timeout=5"] if name == "control" else []))
    assert (done.returncode, done.stderr) == (1, "error: syncer: localhost:1: Connection refused\n")


def test_who_answers_measurements_limits_no_link(runs, programs):
    for command in of_program("links"):
        name, arguments = words_of(command, runs)
        if "--listen" in command:
            done = programs.run(name, *arguments, "--limit=1Mbit")
            assert (done.returncode, done.stderr) == (2, "error: limit: has no use with --listen\n")


def test_commands_of_engines_name_files_that_are_there(runs, tmp_path, programs):
    made = Commands(tmp_path / "commands")
    for engine in ENGINES:
        made.add(engine)
    gke = next(c for c in of_program("launch") if "launcher=gke" in c)
    if not (runs / "gke").exists():  # as where this test runs alone
        name, arguments = words_of(gke, runs)
        assert programs.run(name, *arguments, "--config.model.num_layers=1").returncode == 0
    asked = [c.replace("runs/", f"{runs}/") for c in commands() if c.split()[0] in ENGINES]
    script = tmp_path / "engines.sh"
    script.write_text("\n".join(["set -e", *asked]))
    assert made.run(str(script), ROOT)[0] == 0
    for call in made.calls("kubectl"):
        if "-f" in call:
            assert pathlib.Path(call[call.index("-f") + 1]).is_file()
    (secret,) = (call for call in made.calls("kubectl") if "secret" in call)
    keys = {path.name for path in pathlib.Path(secret[-1].partition("=")[2]).iterdir()}
    manifest = (runs / "gke" / "learners.yaml").read_text() + (runs / "gke" / "syncer.yaml").read_text()
    assert f"name: {secret[3]}" in manifest
    wanted = set(re.findall(r"key: (learner-\d+|tokens)\n", manifest))
    assert wanted and wanted <= keys


@pytest.mark.parametrize("command", [c for c in of_program("train") if "--dry_run" in c])
def test_what_a_run_needs_is_told(command, runs, programs):
    name, arguments = words_of(command, runs)
    done = programs.run(name, *arguments, "--config.model.num_layers=1")
    assert done.returncode == 0 and "Gbit/s" in done.stdout


@pytest.mark.slow
def test_the_run_on_ray_of_the_page(runs, programs):
    pytest.importorskip("ray")
    (command,) = (c for c in of_program("launch") if "launcher=ray" in c)
    settings = f"--config.data.data_dir={programs.data_dir} --config.train.steps=24"
    environment = {**os.environ, "XLA_FLAGS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        f"{command.replace('runs/', f'{runs}/')} {settings}",
        shell=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"finished": true' in (runs / "ray" / "summary.json").read_text()
