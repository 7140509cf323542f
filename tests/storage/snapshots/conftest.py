"""Snapshots of two small parts, to complete, damage and read."""

import dataclasses
import json

import numpy as np
import pytest

from ddiloco.protocol.clocks import VectorClock
from ddiloco.storage.snapshots.parts import write_part
from ddiloco.storage.snapshots.store import Clocks, SnapshotPart, SnapshotStore

ARRAYS = {
    "params/layer_0.w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "params/layer_0": np.float64(2.5),  # a name within another's, and no axis
    "inner/0": np.zeros((0, 3), np.int8),
    "residual/0/0": np.array([-1, 7], np.int32),
}
STATE = {"steps_taken": 12, "position": {"shards": {"0": [1, [2, 3]]}}, "loss": 0.1, "none": None}
_CLOCK = VectorClock({0: (0, 5)}, {0: 1})
CLOCKS = json.loads(json.dumps(dataclasses.asdict(Clocks(VectorClock({0: (0, 3)}, {0: 1}), {0: _CLOCK}))))
HEADER = {"step": 4, "clocks": CLOCKS}


def written(folder, number, names=("syncer", "learner_000")):
    """Parts of a snapshot on disk, without a manifest."""
    return {name: write_part(folder / f"{number:06d}", name, SnapshotPart(ARRAYS, STATE)) for name in names}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A folder with one complete snapshot, number 1, to copy."""
    folder = tmp_path_factory.mktemp("pristine") / "snapshots"
    SnapshotStore(folder, keep=1).complete(1, HEADER, written(folder, 1))
    return folder
