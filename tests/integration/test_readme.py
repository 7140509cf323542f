"""Every command of these pages is one that its program takes; the slow tests run them, cut in size alone."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.bench import test_bench
from tests.integration.programs import ROOT, SMALLEST

PAGES = ("README.md", "docs/first_run.md", "docs/dashboard.md", "docs/weights.md")
SHORT = {"train.steps": 24, "eval.every": 0, "eval.num_batches": 1}
SMALL = {"model.num_layers": 1, "train.batch_size": 2, "eval.batch_size": 4, "sync.num_fragments": 3}
# What other tests train, and have compiled: the programs are the same.
OF_TEXT = {
    name: value
    for name, _, value in (setting.removeprefix("--config.").partition("=") for setting in SMALLEST)
    if name.startswith(("model.", "data.sequence", "sample.", "inner."))
}
BUDGET = {"virtual.seconds": None, "train.tokens": 6_000}
LIMIT = 300.0
# Run by default; all are among the slow tests, and of the others the command line is read.
OFTEN = ("tiny,streaming --settings", "--dry_run", "schedules --schedules", "experiments.tokenize")
OF_SETTINGS = ("train", "sweep", "compare", "tokenize")
OF_A_RUN = ("evaluate", "tape", "replay", "report", "export")


def blocks() -> list[list[str]]:
    """The commands of each block of the pages."""
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    found = re.findall(r"```bash\n(.*?)```", pages, re.S)
    return [[line for line in text.splitlines() if line and not line.startswith("#")] for text in found]


def commands() -> list[str]:
    """Those that no other test runs: not the benchmarks, the killer, the compiler nor the page."""
    elsewhere = [f"experiments.bench {name}" for name in (*test_bench.NAMES, *test_bench.SLOW)]
    elsewhere += ["experiments.chaos ", "experiments.compile ", "experiments.dashboard "]
    return [c for block in blocks() for c in block if not any(other in c for other in elsewhere)]


def groups() -> list[list[str]]:
    """All commands; together in their order those that go on with each other's run."""
    together = [[c for c in commands() if folder in c] for folder in ("runs/mine", "runs/long")]
    alone = [[c] for c in commands() if not any(c in group for group in together)]
    return [*together, *alone]


def smaller(command: str, runs: pathlib.Path) -> str:
    """The same command, made short and small, in the test's folder."""
    command = command.replace("runs/", f"{runs}/")
    if "experiments.sweep" in command:
        short = command.replace("interval=12,24;seed=0,1", "interval=12;seed=0")
        assert short != command
        points = ";".join(f"{name}={value}" for name, value in {**SHORT, **SMALL, **OF_TEXT}.items())
        return short.replace('--sweep="', f'--sweep="{points};')
    if "experiments.bench" in command:
        return re.sub(r"--schedules=\d+", "--schedules=8", f"{command} --quick")
    if "experiments.simulate" in command:
        return f"{command} --config.days=0.1 --config.seeds=2"
    if "experiments.compare" in command:
        return f"{command} {_settings({'virtual.arrays': False, **BUDGET})}"
    if command.startswith("scripts/test.sh"):
        return f"{command} tests/protocol/test_estimates.py"
    if re.search(r"--dry_run|--settings|experiments\.(evaluate|export|replay|report|tape)", command):
        command = re.sub(r"--around=\d+", f"--around={SHORT['train.steps']}", command)
        return command.replace("--dry_run", "--dry_run --config.model.num_layers=1")
    if command == "scripts/train.sh":
        changes = {**SHORT, **SMALL, **OF_TEXT, "sync.num_learners": 2}
        return f"{command} {_settings(changes)} --workdir={runs}/run"
    # As many snapshots as on the page, for which so small a model's steps would be too fast.
    often = f"snapshot.every={SHORT['train.steps'] // 3} --config.train.min_step_seconds=0.2,0.2,0.2,0.2"
    command = command.replace("snapshot.every=160", often)
    changes = {**SHORT, **SMALL}
    if "configs/vit.py" not in command and "configs/multimodal.py" not in command:
        changes |= OF_TEXT
    if "configs/chaos.py" in command:
        changes |= BUDGET
    if "driver=remote" in command or "device_count" in command:
        command = command.replace("device_count=8", "device_count=4")
        changes |= {"sync.num_learners": 2}
    workdir = "" if "--workdir" in command or "experiments.tokenize" in command else f"--workdir={runs}/run"
    return f"{command} {_settings(changes)} {workdir}"


def _settings(changes: dict) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def run(command: str, programs) -> None:
    """Runs it, a Python program without its imports."""
    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words[: next(i for i, w in enumerate(words) if "=" not in w)])
    words = words[len(given) :]
    if words[:2] == ["python", "-m"]:
        flags = f"{programs.environment['XLA_FLAGS']} {given.pop('XLA_FLAGS', '')}"
        done = programs.finish(programs.start_module(*words[2:], XLA_FLAGS=flags, CI="true", **given), LIMIT)
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=as_a_user(programs),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, f"{shlex.quote(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def as_a_user(programs) -> dict[str, str]:
    """The environment of a script, with the interpreter of this test."""
    kept = {name: value for name, value in programs.environment.items() if name != "PYTEST_XDIST_WORKER"}
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), kept["PATH"]])
    # Whoever runs all tests checks the types beside them, once.
    return {**kept, "PATH": path, "CI": "true", "PYTEST_WORKERS": "0", "BASH_FUNC_mypy%%": "() { :; }"}


def test_the_readme_has_the_two_commands_that_do_all_the_set_up():
    assert "scripts/train.sh" in commands() and "scripts/test.sh" in commands()


def parameters() -> list:
    """The groups; the slow ones are those of which a test without a run reads the command lines."""
    quick = lambda group: group == ["scripts/train.sh"] or any(name in group[0] for name in OFTEN)  # noqa: E731
    names = [" ".join(group[0].split()[-3:])[-60:] for group in groups()]
    return [
        pytest.param(group, id=name, marks=() if quick(group) else pytest.mark.slow)
        for group, name in zip(groups(), names, strict=True)
    ]


@pytest.mark.parametrize("group", parameters())
def test_every_command_of_the_readme_runs(group, programs, tmp_path):
    if group[0].startswith("scripts/") and not (ROOT / ".venv" / "installed").exists():
        pytest.skip("needs the environment of scripts/test.sh")
    for command in group:
        run(smaller(command, tmp_path), programs)


@pytest.mark.parametrize("program", [*OF_SETTINGS, *OF_A_RUN])
def test_a_program_takes_the_command_lines_of_the_pages(program, programs, tmp_path):
    """Each is refused for what is wrong here alone: no steps, or no run in the folder."""
    lines = [c.partition(f"experiments.{program} ")[2] for c in commands() if f"experiments.{program} " in c]
    assert lines
    refused = f"(workdir|checkpoint): {tmp_path}"
    for line in lines:
        arguments = shlex.split(line.replace("runs/", f"{tmp_path}/"))
        if program in OF_SETTINGS:
            arguments, refused = [*arguments, "--config.train.steps=0"], "config.train.steps: is 0"
        done = programs.run(program, *arguments)
        assert done.returncode == 2 and re.match(f"error: (.*: )?{refused}", done.stderr), (line, done.stderr)
