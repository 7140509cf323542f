"""Runs side by side in processes of their own: how they end, and that they end."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from ddiloco.launch import processes
from experiments.front import cli
from experiments.studies import runs
from tests.remote.ends import alive, until

ENDS = "import sys; sys.exit(int(sys.argv[1]))"
THREADS = "import os, sys; sys.exit(int(os.environ['PJRT_NPROC']))"
INTERRUPTS = """
    import os, signal, sys
    os.kill(int(sys.argv[1]), signal.SIGINT)
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
    for name, text in {"ends": ENDS, "threads": THREADS, "interrupts": INTERRUPTS, "holds": HOLDS}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)


def test_runs_side_by_side_tell_their_exit_statuses():
    started, ended = [], {}
    runs.run_all("ends", [["0"], ["3"], ["2"]], 2, started.append, ended.__setitem__)
    assert (started, ended) == ([0, 1, 2], {0: 0, 1: 3, 2: 2})


def test_what_is_appended_as_a_run_ends_is_run_too():
    arguments, ended = [["1"], ["2"]], []

    def note(place, status):
        ended.append((place, status))
        if status < 5:
            arguments.append([str(status + 4)])

    runs.run_all("ends", arguments, 1, lambda _: None, note)
    assert ended == [(0, 1), (1, 2), (2, 5), (3, 6)]


@dataclasses.dataclass(frozen=True)
class Pretended:
    """A run that is over once it has been run."""

    name: str
    over: set[str]

    @property
    def run(self):
        return runs.Run(self.name, (), pathlib.Path(self.name))

    def lacks(self):
        return None if self.name in self.over else "it has not finished"


def test_training_goes_on_with_what_a_run_leads_to_and_skips_what_is_there(monkeypatch):
    over = {"b", "d"}
    told, ended = [], []
    leads = {"a": ["d", "e"], "e": ["f"]}
    of = lambda names: [Pretended(name, over) for name in names]  # noqa: E731

    def run_all(module, arguments, jobs, started, note):
        for place, given in enumerate(arguments):  # which grows
            started(place)
            if not given[0].endswith("=f"):
                over.add(given[0].removeprefix("--config="))
            note(place, 0)

    def end(run):
        ended.append(run.name)
        return of(leads.get(run.name, []))

    monkeypatch.setattr(runs, "run_all", run_all)
    monkeypatch.setattr(cli, "tell", told.append)
    failed = runs.train(of(["a", "b", "c"]), 2, end)
    assert ended == ["a", "c", "e", "f"]
    assert told == ["[1/3] a", "[3/5] c", "[5/5] e", "[6/6] f"]
    assert failed == ["f (it has not finished)"]


def test_runs_side_by_side_divide_the_cores(monkeypatch):
    monkeypatch.setattr(processes, "_own_cores", lambda: 6)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    ended = {}
    for runs_at_a_time, count in ((2, 3), (4, 2), (8, 1)):
        runs.run_all("threads", [[]] * count, runs_at_a_time, lambda _: None, ended.__setitem__)
        assert set(ended.values()) == {6 // min(runs_at_a_time, count)}
        ended.clear()


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_runs_under_way_and_starts_no_other(ctrl_c):
    started, ended = [], []
    with pytest.raises(KeyboardInterrupt):
        runs.run_all("interrupts", [[str(os.getpid())], [""]], 1, started.append, lambda *_: ended.append(_))
    assert (started, ended) == ([0], [])


def test_runs_are_forked_and_end_with_who_runs_them_however_that_ends(tmp_path):
    told = tmp_path / "told"
    program = f"""
from ddiloco.launch import processes
from experiments.studies import runs
processes.PRELOADED = (processes.PRELOADED[0], "tensorboardX")  # no other import matters here
runs.run_all("holds", [[{str(told)!r}]] * 2, 2, print, print)
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
