"""The global model on disk: what is read is what was saved, and damage is told in one line."""

import errno
import logging
import pathlib
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from ddiloco.storage import checkpoints
from ddiloco.storage.checkpoints import CheckpointError, restore, save
from ddiloco.training.parameters import sampled_parameters
from tests.refusals import refusal
from tests.small_disks import fill, small_disk
from tests.workbench import assert_equal, experiment

EXPERIMENT = experiment("anywhere")


def parameters(seed):
    return {name: np.asarray(value) for name, value in sampled_parameters(EXPERIMENT.model, seed)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (4, 12):
        save(folder, step, EXPERIMENT, parameters(step), 1.5 + step)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def told(folder):
    return refusal(CheckpointError, restore, folder)


def test_the_newest_checkpoint_is_read_as_it_was_saved(saved):
    checkpoint = restore(saved)
    assert (checkpoint.step, checkpoint.experiment, checkpoint.eval_loss) == (12, EXPERIMENT, 13.5)
    assert_equal(checkpoint.params, parameters(12))
    assert list(checkpoint.params) == sorted(checkpoint.params)
    older = restore(saved / "4")
    assert older.step == 4
    assert_equal(older.params, parameters(4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_that_is_not_finite_is_neither_saved_nor_read(value, copied, monkeypatch):
    params = parameters(20)
    name = max(params)
    params[name] = np.full_like(params[name], value)
    said = f"{name} holds numbers that are not finite"
    told_of = refusal(CheckpointError, save, copied, 20, EXPERIMENT, params, None)
    assert told_of == f"{copied / '20'}: is not written: {said}"
    assert restore(copied).step == 12
    monkeypatch.setattr(checkpoints, "check_finite", lambda arrays: None)  # as earlier versions wrote it
    save(copied, 20, EXPERIMENT, params, None)
    monkeypatch.undo()
    assert told(copied) == f"{copied / '20'}: {said}"


def test_on_a_full_disk_it_is_not_saved_and_other_steps_stand(tmp_path):
    with small_disk(tmp_path / "checkpoints", "1m") as folder:
        save(folder, 4, EXPERIMENT, {"a": np.ones(4, np.float32)}, None)
        fill(folder / "in the way")
        with pytest.raises(CheckpointError) as raised:
            save(folder, 12, EXPERIMENT, parameters(12), None)
        assert str(raised.value) == f"{folder}/12: cannot be written: No space left on device"
        with ocp.CheckpointManager(folder) as manager:
            assert manager.all_steps() == [4]


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_who_is_killed_as_a_step_is_saved_again_leaves_the_older_one(copied, monkeypatch):
    def killed(*given, **more):
        raise Killed

    with monkeypatch.context() as dying, pytest.raises(Killed):
        dying.setattr(ocp.CheckpointManager, "save", killed)
        save(copied, 12, EXPERIMENT, parameters(7), None)
    assert_equal(restore(copied).params, parameters(12))


@pytest.mark.parametrize("renames", [0, 1])
@pytest.mark.parametrize("again", [False, True])
def test_who_is_killed_as_a_step_takes_another_s_place_leaves_one_of_the_two(
    copied, monkeypatch, renames, again
):
    rename, left = pathlib.Path.rename, iter(range(renames))

    def killed(path, target):
        if path.parent in (copied, copied / ".new") and next(left, None) is None:
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as dying, pytest.raises(Killed):
        dying.setattr(pathlib.Path, "rename", killed)
        save(copied, 12, EXPERIMENT, parameters(7), None)
    if again:  # and the disk is full by now

        def full(*given, **more):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as later, pytest.raises(CheckpointError):
            later.setattr(ocp.CheckpointManager, "save", full)
            save(copied, 12, EXPERIMENT, parameters(8), None)
    assert_equal(restore(copied).params, parameters((12, 7)[renames]))


def test_of_other_steps_the_newest_is_kept_and_an_earlier_one_may_be_saved(copied):
    save(copied, 8, EXPERIMENT, parameters(8), None)
    assert restore(copied / "8").step == 8
    assert restore(copied.parent).step == 12, "of a run's folder"
    save(copied, 20, EXPERIMENT, parameters(20), None)
    assert [restore(copied / str(step)).step for step in (12, 20)] == [12, 20]
    assert not (copied / "4").exists() and not (copied / "8").exists()


def test_a_folder_that_is_not_there_or_has_no_checkpoint_is_told(tmp_path):
    assert told(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder of checkpoints"
    (tmp_path / "notes.txt").write_text("nothing")
    assert told(tmp_path) == f"{tmp_path}: holds no checkpoint"


def test_a_damaged_file_is_told(copied):
    victims = [path for path in (copied / "12" / "params").rglob("*") if path.is_file()]
    for path in victims:
        path.write_bytes(bytes(reversed(path.read_bytes())))
    assert told(copied).startswith(f"{copied / '12'}: cannot be read: ")


@pytest.mark.parametrize("part", ["params", "metadata"])
def test_a_missing_part_is_told(copied, part, caplog):
    caplog.set_level(logging.CRITICAL)
    shutil.rmtree(copied / "12" / part)
    assert told(copied).startswith(f"{copied / '12'}: cannot be read: ")


def test_one_altered_number_is_told(copied):
    changed = parameters(12)
    changed["head/kernel"] = changed["head/kernel"].copy()
    changed["head/kernel"][0, 0] += 1e-3
    other = copied.parent / "other"
    save(other, 12, EXPERIMENT, changed, None)
    shutil.rmtree(copied / "12" / "params")
    shutil.copytree(other / "12" / "params", copied / "12" / "params")
    assert told(copied) == "checkpoint 12: its parameters are not the ones that were saved (sha256 differs)"


def test_what_a_killed_process_has_left_of_a_checkpoint_goes_with_the_next(tmp_path):
    left = tmp_path / ".new" / "10.orbax-checkpoint-tmp" / "params"
    left.mkdir(parents=True)
    (left / "array").write_bytes(bytes(100))
    save(tmp_path, 20, EXPERIMENT, parameters(20), 1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["20"]


@pytest.mark.parametrize("name", ["run [1]", "a*?{b}\\ ä", "#1 %20"])
def test_a_folder_s_name_is_no_pattern(name, tmp_path):
    for step in (4, 12):
        save(tmp_path / name / "checkpoints", step, EXPERIMENT, parameters(step), None)
    restored = restore(tmp_path / name)
    assert restored.step == 12
    assert_equal(restored.params, parameters(12))
    assert [path.name for path in tmp_path.iterdir()] == [name]
