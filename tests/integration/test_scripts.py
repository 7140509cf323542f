"""The shell scripts: they can be run, and refuse what cannot work in one line."""

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from tests.remote.ends import until

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"


def refused(python):
    """What is said of an interpreter with which there is no environment."""
    script, told = ["bash", SCRIPTS / "environment.sh"], {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(script, env=told, cwd=python.parent, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def test_an_old_python_is_refused_in_one_line(tmp_path):
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo Python 3.8.20; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    assert refused(old) == (
        f"error: {old} is Python 3.8.20, but Python 3.11 or later is needed (set PYTHON to one)\n"
    )


def test_a_python_that_is_not_there_is_told(tmp_path):
    assert str(tmp_path / "no_python") in refused(tmp_path / "no_python")


RECORDING = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *flock*) exec {python} "$@" ;; esac
if [ "$1 $2" = "-m venv" ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/activate; fi
"""


@pytest.fixture
def set_up(tmp_path):
    """Starts a set-up of a folder with a Python that writes down what it is called for; and its log."""
    log, python = tmp_path / "log", tmp_path / "commands" / "python"
    for folder in ("scripts", "commands"):
        (tmp_path / folder).mkdir()
    for name in ("setup.py", "requirements.lock"):
        (tmp_path / name).touch()
    text = (SCRIPTS / "environment.sh").read_text().replace("/dev/accel0", str(tmp_path / "accel0"))
    script = tmp_path / "scripts" / "environment.sh"
    script.write_text(text)
    python.write_text(RECORDING.format(log=log, python=sys.executable))
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment = {**plain, "PATH": f"{python.parent}:{plain['PATH']}", "PYTHON": str(python)}
    return lambda: subprocess.Popen(["bash", script], env=environment), log


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_with_a_tpu_s_device_gets_what_tpus_need_whatever_its_shell_knows(there, set_up, tmp_path):
    start, log = set_up
    if there:
        (tmp_path / "accel0").touch()
    assert start().wait(60) == 0
    assert ("tpu]" in log.read_text()) is there


def test_of_two_set_ups_at_a_time_the_second_waits_for_the_first_and_does_nothing(set_up, tmp_path):
    start, log = set_up
    assert start().wait(60) == 0
    installed = tmp_path / ".venv" / "installed"
    done = installed.read_text()
    installed.unlink()
    before = log.read_text()
    with (tmp_path / ".venv" / "lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = start()
        until(lambda: "flock" in log.read_text().removeprefix(before), "the second at the lock")
        installed.write_text(done)
    assert second.wait(60) == 0
    assert "-m venv" not in log.read_text().removeprefix(before)


def make_certs(folder, *arguments):
    return subprocess.run([SCRIPTS / "make_certs.sh", *arguments], cwd=folder, capture_output=True, text=True)


def test_the_number_of_learners_may_stand_anywhere_among_the_hosts(tmp_path):
    assert make_certs(tmp_path, ".", "localhost", "--learners=2").returncode == 0
    assert {folder.name for folder in tmp_path.iterdir()} == {"authority", "syncer", "learner-0", "learner-1"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["localhost"], "name a folder for the certificates, then every name or address of the syncer"),
        (["certs", "localhost", "--learners=0"], "--learners=0: the only flag is --learners=N, from 1"),
        (["certs", "localhost", "--learner=2"], "--learner=2: the only flag is --learners=N, from 1"),
    ],
)
def test_certificates_for_a_command_line_that_is_not_understood_are_not_made(arguments, told, tmp_path):
    done = make_certs(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {told}\n")
    assert not list(tmp_path.iterdir())
