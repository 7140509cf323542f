"""A run notices that its folder's path leads to another run."""

import pytest

from ddiloco.disk.ownership import owned
from ddiloco.observe.owner import Owner


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
