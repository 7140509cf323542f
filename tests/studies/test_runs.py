"""Runs side by side in processes of their own: how they end, and that they end."""

import dataclasses
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from ddiloco.launch import processes
from experiments.cli import program
from experiments.studies import runs
from tests.remote.ends import alive, until

ENDS = """
    import os, pathlib, sys
    status, *left = sys.argv[1:]
    for path in left:
        pathlib.Path(path).write_text(os.environ["PJRT_NPROC"])
    sys.exit(int(status))
"""
INTERRUPTS = """
    import os, signal, sys
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(int(sys.argv[1]), signal.SIGINT)
    signal.pause()
"""
STAYS = """
    import os, signal, sys
    interrupt = lambda *_: os.kill(int(sys.argv[1]), signal.SIGINT)
    signal.signal(signal.SIGTERM, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    interrupt()
    while True:
        signal.pause()
"""
HOLDS = """
    import os, signal, sys
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()} {'tensorboardX' in sys.modules}\\n")
    signal.pause()
"""


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """The programs above can be imported."""
    made = {"ends": ENDS, "interrupts": INTERRUPTS, "stays": STAYS, "holds": HOLDS}
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def told(monkeypatch):
    """What is said of the runs, which are of the program `ends`."""
    lines = []
    monkeypatch.setattr(runs, "PROGRAM", "ends")
    monkeypatch.setattr(program, "print_err", lines.append)
    return lines


@dataclasses.dataclass(frozen=True)
class Pretended:
    """A run of one of the programs above, which is over once there is its file."""

    workdir: pathlib.Path
    given: tuple[str, ...] = ("0",)

    @property
    def name(self):
        return self.workdir.name

    def command(self):
        return self.given

    def lacks(self):
        return None if self.workdir.exists() else "it has not finished"


def ends(path, status="0"):
    return Pretended(path, (status, str(path)))


def test_runs_side_by_side_are_named_if_they_fail(told, tmp_path):
    ended = []
    planned = [ends(tmp_path / "sound"), ends(tmp_path / "broken", "3"), Pretended(tmp_path / "idle")]
    failed = runs.train(planned, 2, lambda run: ended.append(run.name))
    assert sorted(failed) == ["broken (exit status 3)", "idle (it has not finished)"]
    assert told == ["[1/3] sound", "[2/3] broken", "[3/3] idle"] and set(ended) == {"sound", "broken", "idle"}


def test_what_is_there_is_not_run_again(told, tmp_path):
    (tmp_path / "b").touch()
    ended = []
    assert runs.train([ends(tmp_path / name) for name in "abc"], 1, lambda run: ended.append(run.name)) == []
    assert ended == ["a", "c"] and told == ["[1/3] a", "[3/3] c"]


def test_a_run_that_is_refused_ends_the_others(told, tmp_path):
    with pytest.raises(program.UsageError, match=r"^refused: cannot run; the reason stands above$"):
        runs.train([Pretended(tmp_path / "refused", ("2",)), ends(tmp_path / "other")], 1, lambda run: None)
    assert told == ["[1/2] refused"]


def test_a_run_that_is_refused_once_another_has_ended_is_one_that_failed(told, tmp_path):
    planned = [ends(tmp_path / "sound"), Pretended(tmp_path / "refused", ("2",)), ends(tmp_path / "other")]
    failed = runs.train(planned, 1, lambda run: None)
    assert failed == ["refused (it cannot run; the reason stands above)"]
    assert told == ["[1/3] sound", "[2/3] refused", "[3/3] other"]


def test_runs_side_by_side_divide_the_cores(monkeypatch, told, tmp_path):
    monkeypatch.setattr(processes, "_own_cores", lambda: 6)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    for jobs, count in ((2, 3), (4, 2), (8, 1)):
        planned = [ends(tmp_path / f"{jobs}-{i}") for i in range(count)]
        assert runs.train(planned, jobs, lambda run: None) == []
        assert {run.workdir.read_text() for run in planned} == {str(6 // min(jobs, count))}


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_runs_under_way_and_starts_no_other(ctrl_c, told, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PROGRAM", "interrupts")
    ended = []
    planned = [Pretended(tmp_path / name, (str(os.getpid()),)) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        runs.train(planned, 1, ended.append)
    assert ended == []
    assert told == [
        "[1/2] first",
        "saving what is under way; a second Ctrl-C ends this at once, unsaved",
        "interrupted with 2 of 2 runs to do; the same command goes on",
    ]


def test_a_second_ctrl_c_ends_also_runs_that_do_not_end(ctrl_c, told, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PROGRAM", "stays")
    with pytest.raises(KeyboardInterrupt):
        runs.train([Pretended(tmp_path / "first", (str(os.getpid()),))], 1, lambda run: None)
    until(lambda: not multiprocessing.active_children(), "its end")


def test_runs_are_forked_and_end_with_who_runs_them_however_that_ends(tmp_path):
    told = tmp_path / "told"
    program = f"""
import pathlib
from ddiloco.launch import processes
from experiments.studies import runs
from tests.studies.test_runs import Pretended
processes.PRELOADED = (processes.PRELOADED[0], "tensorboardX")  # no other import matters here
runs.PROGRAM = "holds"
runs.train([Pretended(pathlib.Path("/nowhere"), ({str(told)!r},))] * 2, 2, print)
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: told.exists() and told.read_text().count("\n") == 2, "both runs", 60.0)
    finally:
        process.kill()
        process.wait()
    numbers, preloaded = zip(*map(str.split, told.read_text().splitlines()), strict=True)
    assert set(preloaded) == {"True"}
    until(lambda: not any(alive(int(number)) for number in numbers), "their ends", 60.0)
