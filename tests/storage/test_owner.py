"""A run notices that its folder's path leads to another run."""

import fcntl

import pytest

from ddiloco.storage.workdir import LOCK, Owner, owned


@pytest.mark.parametrize("lost", ["moved", "unlocked"])
def test_a_folder_that_another_run_has_taken_is_no_longer_its_own(lost, tmp_path):
    folder = tmp_path / "run"
    with owned(folder):
        owner = Owner(folder)
        owner.check()
        if lost == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            (folder / ".lock").unlink()
        owner.check()  # nobody else is there yet
        with owned(folder), pytest.raises(OSError, match="another run has taken the folder"):
            owner.check()
        owner.check()  # whoever was there is gone again


def test_a_folder_without_a_lock_is_of_nobody(tmp_path):
    owner = Owner(tmp_path)
    with owned(tmp_path):
        owner.check()


def test_a_look_whether_a_folder_is_taken_keeps_nobody_from_taking_it(tmp_path, monkeypatch):
    tries, flock = [], fcntl.flock
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as look:
        flock(look, fcntl.LOCK_SH)

        def slow_look(file, kind):
            tries.append(kind)
            if len(tries) == 4:
                flock(look, fcntl.LOCK_UN)
            flock(file, kind)

        monkeypatch.setattr(fcntl, "flock", slow_look)
        with owned(tmp_path):
            assert len(tries) >= 4
