"""A run set back to an earlier step: the bits that it had then, and nothing lost of what came later."""

import json
import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.run import rollback
from ddiloco.run.rollback import roll_back
from ddiloco.storage.durable import DurableState
from ddiloco.storage.ownership import owned
from tests.storage.test_fragment_history import LAYOUT, ROUNDS, THETA, committed


@pytest.fixture
def workdir(tmp_path):
    """A run with ROUNDS, and the model's hash after each of them."""
    hashes, _ = committed(tmp_path / "syncer", ROUNDS)
    lines = [
        {"step": step, "fragment": p, "version": 1 + n // 2, "learners": [0], "tokens": 10, "time": 100.0 + n}
        for n, (step, p) in enumerate(ROUNDS)
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("tape", "snapshots"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_later").touch()
    return tmp_path, hashes


def restored(folder):
    model = GlobalModel(LAYOUT, THETA, OuterConfig(optimizer="nesterov"), 1)
    state = DurableState(folder, LAYOUT, print, threading.Event()).restore(model)
    return state, model.sha256()


@pytest.mark.parametrize("step, merged", [(5, 3), (6, 4), (8, 4), (100, 6)])
def test_the_model_is_what_it_was_at_that_step_to_the_bit(workdir, step, merged):
    folder, hashes = workdir
    done = roll_back(folder, step)
    state, sha256 = restored(folder / "syncer")
    assert sha256 == hashes[merged]
    assert state.versions == done.versions
    assert state.step == done.step == ROUNDS[merged - 1][0]
    assert state.incarnations == ((0, 7),)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == merged
    mark = state.furthest(0)
    assert (mark.life, mark.steps, mark.position) == (7, state.step, f"after {state.step}")


def test_what_came_later_is_set_aside(workdir):
    folder, hashes = workdir
    done = roll_back(folder, 5)
    assert restored(done.previous / "syncer")[1] == hashes[-1]
    assert len((done.previous / "rounds.jsonl").read_text().splitlines()) == 3
    for name in ("tape", "snapshots"):
        assert (done.previous / name / "of_later").exists()
        assert not (folder / name / "of_later").exists()
    assert restored(folder / "tape" / "began" / "syncer") == restored(folder / "syncer"), (
        "to be replayed from"
    )


def test_a_run_can_be_set_back_again_as_far_as_its_versions_go(workdir):
    folder, hashes = workdir
    roll_back(folder, 6)
    roll_back(folder, 2)
    assert restored(folder / "syncer")[1] == hashes[2]
    with pytest.raises(ConfigError, match="to: is 1, but versions of all fragments are kept from step 2 on"):
        roll_back(folder, 1)
    assert restored(folder / "syncer")[1] == hashes[2], "and a refusal changes nothing"


@pytest.mark.parametrize("fatal", ["trim", "_prepare", "_keep_with_tapes"])
def test_interrupted_it_is_done_by_the_next_call(workdir, monkeypatch, fatal):
    folder, hashes = workdir
    whole = getattr(rollback, fatal)

    def interrupted(*arguments):
        whole(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(rollback, fatal, interrupted)
    with pytest.raises(KeyboardInterrupt):
        roll_back(folder, 6)
    monkeypatch.undo()
    roll_back(folder, 6)
    assert restored(folder / "syncer")[1] == hashes[4]


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"workdir: .* has no syncer's folder"):
        roll_back(tmp_path, 3)


def test_a_run_that_goes_on_is_not_set_back(workdir):
    folder, hashes = workdir
    with owned(folder), pytest.raises(ConfigError, match="belongs to a run in progress, of process"):
        roll_back(folder, 6)
    assert restored(folder / "syncer")[1] == hashes[-1]
    with pytest.raises(ConfigError, match="is no folder"):
        roll_back(folder / "elsewhere", 6)
    assert not (folder / "elsewhere").exists()
