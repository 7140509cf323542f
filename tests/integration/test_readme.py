"""Every command of the README and of docs/commands.md runs; only its length is cut."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.bench import test_bench

ROOT = pathlib.Path(__file__).parents[2]
SHORT = "--config.train.steps=24 --config.eval.every=0 --config.eval.num_batches=1 --config.sample.tokens=4"
BUDGET = "--config.virtual.seconds=None --config.train.tokens=100000"


PAGES = ("README.md", "docs/commands.md")


def blocks() -> list[list[str]]:
    """The commands of each block of the pages."""
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    found = re.findall(r"```bash\n(.*?)```", pages, re.S)
    return [[line for line in text.splitlines() if line and not line.startswith("#")] for text in found]


def groups() -> list[list[str]]:
    """All commands; together in their order those that go on with each other's run."""
    commands = [command for block in blocks() for command in block]
    together = [[c for c in commands if folder in c] for folder in ("runs/mine", "runs/long")]
    alone = [[c] for c in commands if not any(c in group for group in together)]
    return [*together, *alone]


def shortened(command: str, runs: pathlib.Path) -> str:
    """The same command, made short: fewer steps, one quick test, the folder of the test."""
    command = command.replace("runs/", f"{runs}/")
    if "experiments.sweep" in command:
        short = command.replace("interval=12,24;seed=0,1", "interval=12;seed=0")
        assert short != command
        return short.replace('--sweep="', '--sweep="train.steps=24;eval.every=0;sample.tokens=4;')
    if "experiments.bench" in command:
        return f"{command} --quick"
    if "experiments.simulate" in command:
        return f"{command} --config.days=1 --config.seeds=2"
    if "experiments.compare" in command:
        return f"{command} --config.virtual.arrays=False {BUDGET}"
    if "configs/chaos.py" in command:
        return f"{command} {SHORT} {BUDGET} --workdir={runs}/chaos"
    if command.startswith("scripts/test.sh"):
        return f"{command} tests/protocol/test_estimates.py"
    if re.search(r"--dry_run|--settings|experiments\.(evaluate|replay|tape)", command):
        return command
    if "configs/vit.py" in command or "configs/multimodal.py" in command:  # whose samples have no length
        return f"{command} {SHORT.replace('--config.sample.tokens=4', '')} --workdir={runs}/images"
    workdir = "" if "--workdir" in command else f"--workdir={runs}/run"
    return f"{command} {SHORT} {workdir}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The scripts' environment, as the interpreter of this test, without its simulated devices."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTEST_XDIST_WORKER")
    }
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), kept["PATH"]])
    return {**kept, "PATH": path, "CI": "true", "PYTEST_WORKERS": "1"}


def test_the_readme_has_the_two_commands_that_do_all_the_set_up():
    commands = [command for block in blocks() for command in block]
    assert "scripts/train.sh" in commands and "scripts/test.sh" in commands


@pytest.mark.parametrize("group", groups(), ids=lambda group: " ".join(group[0].split()[-3:])[-60:])
def test_every_command_of_the_readme_runs(group, environment, tmp_path):
    if not (ROOT / ".venv" / "installed").exists():
        pytest.skip("needs the environment of scripts/test.sh")
    for command in group:
        if "experiments.bench" in command and command.split()[3] in test_bench.NAMES:
            continue  # run there
        if "experiments.chaos" in command:
            continue  # run by tests/integration/test_chaos.py
        short = shortened(command, tmp_path)
        done = subprocess.run(
            short,
            shell=True,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.quote(short)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
