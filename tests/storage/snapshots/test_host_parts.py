"""Parts of a snapshot that several hosts write: put together whole or in other blocks; damage is seen."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.arrays.blocks import Blocks, Cut, box_of
from ddiloco.remote.learner.host_snapshots import HostPartWriter, write_own
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage.learner_state import StateOfAllHosts
from ddiloco.storage.snapshots.parts import (
    PartFiles,
    SnapshotError,
    SnapshotPart,
    file_of,
    joined,
    read_part,
    read_state,
    write_blocks,
    write_part,
)
from ddiloco.storage.snapshots.store import SnapshotStore

STATE = {"clock": 7, "position": None}
SPECS = {"params/w": PartitionSpec("x"), "inner/0": PartitionSpec(), "anchor/0/0": PartitionSpec(None, "x")}
ARRAYS = {
    "params/w": np.arange(48, dtype=np.float32).reshape(8, 6),
    "inner/0": np.int32(5),
    "anchor/0/0": np.arange(16).reshape(2, 8).astype(jnp.bfloat16),
}


@pytest.fixture
def arrays():
    """The arrays on four devices, of which each host has two."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    return {name: jax.device_put(ARRAYS[name], NamedSharding(mesh, spec)) for name, spec in SPECS.items()}


def of_host(number, arrays):
    """What one of the hosts answers for."""
    devices = jax.devices()[2 * number : 2 * number + 2]

    def own(array):
        shards = [s for s in array.addressable_shards if s.device in devices and s.replica_id == 0]
        return Blocks(array.shape, {box_of(s.index, array.shape): np.asarray(s.data) for s in shards})

    return {name: own(array) for name, array in arrays.items()}


def written(folder, *hosts):
    """The files of a part in a folder, of the arrays that these hosts have."""
    first = write_part(folder.parent, folder.name, SnapshotPart(hosts[0], STATE))
    return joined([first, *(write_blocks(folder, file_of(i), own) for i, own in enumerate(hosts[1:], 1))])


@pytest.fixture
def folder(tmp_path):
    """Of a part."""
    return tmp_path / "learner_000"


@pytest.fixture
def part(folder, arrays):
    """The files of a part in its folder."""
    return written(folder, of_host(0, arrays), of_host(1, arrays))


def test_one_process_reads_the_whole(folder, part):
    read = read_part(folder, part)
    assert read.state == STATE == read_state(folder, part)
    assert read.arrays.keys() == ARRAYS.keys()
    for name, array in read.arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(array, ARRAYS[name])
    assert PartFiles.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_hosts_of_another_number_read_what_they_need(folder, part):
    for first, stop in ((0, 3), (3, 8), (2, 3)):
        needs = {"params/w": Cut((8, 6), (((first, stop), (1, 5)),))}
        read = read_part(folder, part, lambda name, shape, n=needs: n.get(name, Cut.whole(shape)))
        np.testing.assert_array_equal(read.arrays["params/w"].all, ARRAYS["params/w"][first:stop, 1:5])
        assert read.arrays["inner/0"].all == 5
    assert read.arrays["params/w"].all.base.size == 4, "nothing else of the file stays"


def test_a_host_reads_no_file_that_has_nothing_for_it(folder, part):
    whole = (folder / file_of(1)).read_bytes()
    (folder / file_of(1)).write_bytes(whole[:-8])  # which nobody sees who does not read it

    def needs(rows, columns):
        cuts = {"params/w": Cut((8, 6), ((rows, (0, 6)),)), "anchor/0/0": Cut((2, 8), (((0, 2), columns),))}
        return lambda name, shape: cuts.get(name, Cut.whole(shape))

    read = read_part(folder, part, needs((0, 4), (0, 4)))
    np.testing.assert_array_equal(read.arrays["params/w"].all, ARRAYS["params/w"][:4])
    with pytest.raises(SnapshotError, match=f"{file_of(1)} is damaged"):
        read_part(folder, part, needs((0, 5), (0, 4)))


@pytest.mark.parametrize("name", ["state.json", file_of(0), file_of(1)])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_file_that_is_damaged_is_seen(folder, part, name, damage):
    path = folder / name
    if damage == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(SnapshotError, match=name if damage == "changed" else "cannot be read"):
        read_part(folder, part)


def test_blocks_that_no_host_has_are_missed(folder, arrays):
    second = of_host(1, {name: arrays[name] for name in ("params/w", "inner/0")})
    part = written(folder, of_host(0, arrays), second)
    with pytest.raises(SnapshotError, match="missing, or came twice"):
        read_part(folder, part)


class Followers:
    """Another host, which writes or has a problem."""

    def __init__(self, workdir, arrays, problem):
        self._workdir, self._arrays, self._problem = workdir, arrays, problem

    def doing(self, copy, order):
        assert copy == order.write.copy == 77
        self._snapshot = order.write.snapshot
        return contextlib.nullcontext()

    def done(self, copy, until):
        if self._problem:
            raise WireError("not all hosts", self._problem)
        return [
            pb.FromHost.Done(copy=copy, files=write_own(self._workdir, self._snapshot, 0, 1, self._arrays))
        ]


@pytest.mark.parametrize("problem", ["", "host 1: No space left on device"])
def test_a_part_is_written_once_all_hosts_have_theirs(tmp_path, arrays, problem):
    mine = {name: arrays[name] for name in ("params/w", "inner/0")}
    others = {"anchor/0/0": arrays["anchor/0/0"]}
    staging = tmp_path / "snapshots" / "staging"
    writer = HostPartWriter(staging, Followers(tmp_path, others, problem), lambda: 1.0)
    part = type("Part", (), {"arrays": StateOfAllHosts(mine, 77), "state": STATE})()
    future = writer.write(3, "learner_000", part)
    if problem:
        with pytest.raises(SnapshotError, match="host 1: No space"):
            future.result(10.0)
        return
    files = future.result(10.0)
    (staging / "000003").rename(tmp_path / "snapshots" / "000003")
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    store.complete(3, {"step": 4}, {"learner_000": files})
    snapshot = store.open(3)
    assert snapshot.state("learner_000") == STATE
    for name, array in snapshot.part("learner_000").arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
    writer.close(1.0)


def test_a_host_removes_what_it_left_of_the_learners_part_in_earlier_snapshots(tmp_path, arrays):
    for number in (1, 2):
        write_own(tmp_path, number, 0, 1, arrays)
    staging = tmp_path / "snapshots" / "staging"
    assert [str(path.relative_to(staging)) for path in staging.glob("*/*")] == ["000002/learner_000"]
