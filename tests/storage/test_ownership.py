"""A folder's one owner: nobody else gets in while it lives, and the next one does when it is dead."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from ddiloco.config import ConfigError
from ddiloco.storage.workdir import owned
from tests.small_disks import fill, small_disk

ROOT = pathlib.Path(__file__).parents[2]
OWNS = """
import pathlib, sys
from ddiloco.storage.workdir import owned
with owned(pathlib.Path(sys.argv[1])):
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    command = [sys.executable, "-c", OWNS, str(tmp_path / "run")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.stdin.close()


def test_a_second_owner_is_refused_in_a_line_that_names_the_first(owner, tmp_path):
    with pytest.raises(ConfigError) as raised, owned(tmp_path / "run"):
        pass
    told = str(raised.value)
    assert f"process {owner.pid} on {os.uname().nodename} since " in told
    assert told.startswith("workdir: ") and "\n" not in told


def test_a_killed_owner_leaves_the_folder_to_the_next_even_if_it_was_stopped_before(owner, tmp_path):
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError), owned(tmp_path / "run"):
        pass
    owner.kill()
    owner.wait()
    for _ in range(2):
        with owned(tmp_path / "run"):
            assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()


def test_a_full_disk_keeps_nobody_from_its_folder(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with owned(disk / "run"):
            pass
        fill(disk / "filler")
        with owned(disk / "run"), pytest.raises(ConfigError), owned(disk / "run"):
            pass
