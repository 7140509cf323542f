"""Disks that are full, and processes that are killed as they write."""

import random
import subprocess
import sys

import numpy as np
import pytest

from ddiloco.storage.snapshots.parts import write_part
from ddiloco.storage.snapshots.store import SnapshotError, SnapshotPart, SnapshotStore
from tests import small_disks
from tests.storage.snapshots.conftest import HEADER

KILLS = 8
PART = SnapshotPart({"params/w": np.arange(40_000, dtype=np.float32)}, {"steps": 3})
WRITING = """
import pathlib, sys
import numpy as np
from ddiloco.storage.snapshots.parts import write_part
from ddiloco.storage.snapshots.store import SnapshotPart, SnapshotStore
store = SnapshotStore(pathlib.Path(sys.argv[1]), keep=2)
print("begin", flush=True)
while True:
    number = store.next_number()
    part = SnapshotPart({"params/w": np.full(1000, number)}, {"number": number})
    folder = store.folder / f"{number:06d}"
    files = {name: write_part(folder, name, part) for name in ("syncer", "learner_000")}
    store.complete(number, {"step": number}, files)
    print(number, flush=True)
"""


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 1 MiB."""
    with small_disks.small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.parametrize("leave", [0, 20_480, 131_072])
def test_a_full_disk_costs_a_snapshot_and_no_other(small_disk, leave):
    store, warnings = SnapshotStore(small_disk / "snapshots", keep=1), []
    store.complete(1, HEADER, {"syncer": write_part(store.folder / "000001", "syncer", PART)})
    small_disks.fill(small_disk / "in the way", leave)
    with pytest.raises(SnapshotError, match="cannot be written") as error:
        write_part(store.folder / "000002", "syncer", PART)
    assert "\n" not in str(error.value)
    assert store.newest(warnings.append).number == 1
    (small_disk / "in the way").unlink()
    store.complete(3, HEADER, {"syncer": write_part(store.folder / "000003", "syncer", PART)})
    assert store.newest(warnings.append).part("syncer").state == PART.state
    assert [path.name for path in store.folder.iterdir()] == ["000003"]


def test_a_disk_that_is_full_for_the_manifest_alone_leaves_the_snapshot_incomplete(small_disk):
    store, warnings = SnapshotStore(small_disk / "snapshots", keep=1), []
    files = write_part(store.folder / "000001", "syncer", PART)
    small_disks.fill(small_disk / "in the way", 0)
    with pytest.raises(SnapshotError, match="cannot be completed: No space left on device"):
        store.complete(1, HEADER, {"syncer": files})
    assert store.newest(warnings.append) is None
    assert len(warnings) == 1


@pytest.mark.slow
def test_a_writer_that_is_killed_at_any_moment_leaves_what_was_complete(tmp_path):
    chance, told = random.Random(0), 0
    for _ in range(KILLS):
        child = subprocess.Popen([sys.executable, "-c", WRITING, tmp_path], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "begin\n"
        for _ in range(2):
            told = int(child.stdout.readline())
        try:
            child.wait(chance.uniform(0.0, 0.6))
        except subprocess.TimeoutExpired:
            child.kill()
        told = max([told, *(int(line) for line in child.stdout.read().split())])
        warnings = []
        snapshot = SnapshotStore(tmp_path, keep=2).newest(warnings.append)
        assert snapshot.number in (told, told + 1), "complete before it is told"
        assert all("incomplete" in warning for warning in warnings)
        for name in snapshot.parts:
            part = snapshot.part(name)
            assert part.state == {"number": snapshot.number}
            assert (part.arrays["params/w"] == snapshot.number).all()
