"""What the tests of a run's monitor share: a run's description, a terminal, and monitors that end."""

import io

import pytest

from ddiloco.telemetry.monitor import Monitor
from ddiloco.telemetry.records import RunInfo


class Terminal(io.StringIO):
    """A terminal's output; `lines` gives the lines that a person would see."""

    def isatty(self):
        return True

    def lines(self):
        seen = []
        for written in self.getvalue().split("\n"):
            shown = ""
            for part in written.split("\r"):
                shown = part + shown[len(part) :]
            seen.append(shown.rstrip())
        return seen


@pytest.fixture
def terminal(monkeypatch):
    """Puts a terminal in the place of stdout; called within the test, for which pytest sets stdout again."""

    def install():
        made = Terminal()
        monkeypatch.setattr("sys.stdout", made)
        return made

    monkeypatch.delenv("CI", raising=False)
    return install


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes monitors of a run of virtual time, unless told otherwise, and ends them after the test."""
    made = []
    monkeypatch.delenv("CI", raising=False)

    def make(learners=2, *, workdir=tmp_path / "run", log_every=1, clock=None, writers=(), **changes):
        run = info(learners, **changes)
        wanted = {"writers": writers} if writers else {}
        monitor = Monitor(workdir, run, log_every=log_every, clock=clock, **wanted)
        made.append(monitor)
        return monitor

    yield make
    for monitor in made:
        monitor.stop()


@pytest.fixture
def run_info():
    """Describes a run of so many learners."""
    return info


def info(learners=2, **changes):
    described = {
        "algorithm": "decoupled",
        "num_learners": learners,
        "num_params": 1000,
        "num_fragments": 3,
        "total_steps": 4,
        "seed": 7,
        "chips_by_learner": dict.fromkeys(range(learners), 4),
    }
    return RunInfo(**{**described, **changes})
