"""Programs whose output nobody reads: closed, full, or with a reader that has gone or takes nothing."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.integration.programs import ROOT

PROGRAM = """
import os, sys
from experiments.cli import exit_handling, program, streams

def main(_):
    if "training" in sys.argv:
        exit_handling.stop_on_signals()
    left = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    for line in range(3000):
        print(f"line {line}: \\u2713".ljust(100), flush=line % 100 == 0)
        print("told", file=sys.stderr)
    os.write(left, b"done")

program.run(main, positional=True)
"""
ALL_CLOSED = "<&- >&- 2>&-"
UNREAD = ["| head -1", ">&-", ">/dev/full 2>&1", ALL_CLOSED]


def shell(folder, kind, output, **environment):
    """The exit code of the program, what stands in its file, and what was written to standard error."""
    script = f'"$0" -c "$1" {folder / "left"} {kind} {output}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", script, sys.executable, PROGRAM]
    told = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=told)
    lines = done.stderr.replace("told\n", "")
    return done.returncode, (folder / "left").read_text(), lines


@pytest.mark.parametrize("output", UNREAD)
def test_training_does_not_depend_on_who_reads_its_output(output, tmp_path):
    assert shell(tmp_path, "training", output) == (0, "done", "")


@pytest.mark.parametrize(
    ("output", "code", "told"),
    [
        ("| head -1", 128 + signal.SIGPIPE, ""),
        (">/dev/full", 1, "error: standard output: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_a_program_whose_output_is_its_result_says_what_was_lost(output, code, told, tmp_path):
    assert shell(tmp_path, "result", output) == (code, "done", told)


def test_a_text_that_the_encoding_of_the_output_has_not_is_escaped(tmp_path):
    assert shell(tmp_path, "training", "", PYTHONIOENCODING="ascii") == (0, "done", "")


def test_a_reader_that_takes_nothing_does_not_hold_up_training(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "left"), "training"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.wait(60) == 0
    assert (tmp_path / "left").read_text() == "done"


def test_a_terminal_that_is_gone_takes_nothing_with_it(tmp_path):
    shown, terminal = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "left"), "training"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.read(shown, 1)
    os.close(shown)  # it is not the process's controlling terminal, which gets no signal
    assert process.wait(60) == 0
    assert (tmp_path / "left").read_text() == "done"
