"""The store: what was written comes back; what is not all there, or not as it was written, never does."""

import dataclasses
import errno
import itertools
import pathlib
import random
import shutil
import threading
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.clocks import VectorClock
from ddiloco.storage import array_file
from ddiloco.storage.snapshots import parts, store
from ddiloco.storage.snapshots.parts import read_part, write_part
from ddiloco.storage.snapshots.store import (
    Clocks,
    PartFiles,
    PartWriter,
    SnapshotError,
    SnapshotPart,
    SnapshotStore,
)
from ddiloco.storage.tape.header import SnapshotName
from tests.refusals import refusal
from tests.remote.ends import until
from tests.storage.snapshots.conftest import ARRAYS, HEADER, STATE, written

MANIFEST = "manifest.json"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def copied(pristine, tmp_path):
    """A store over a copy of the pristine snapshot, and the copy's folder."""
    shutil.copytree(pristine, tmp_path / "snapshots")
    return SnapshotStore(tmp_path / "snapshots", keep=1), tmp_path / "snapshots" / "000001"


def skipped(store):
    """The one warning of a store that has nothing to resume from."""
    warnings = []
    assert store.newest(warnings.append) is None
    [warning] = warnings
    assert "\n" not in warning
    return warning


def nobody_warns(told):
    raise AssertionError(told)


def test_what_is_written_comes_back(copied):
    snapshot = copied[0].newest(nobody_warns)
    assert (snapshot.number, snapshot.header, set(snapshot.parts)) == (1, HEADER, {"syncer", "learner_000"})
    part = snapshot.part("learner_000")
    assert part.state == STATE
    assert set(part.arrays) == set(ARRAYS)
    for name, array in part.arrays.items():
        assert type(array) is np.ndarray
        assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        np.testing.assert_array_equal(array, ARRAYS[name])


def test_arrays_of_devices_and_a_part_without_arrays_come_back(tmp_path):
    value = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    files = write_part(tmp_path, "syncer", SnapshotPart({"fragment/0/0": value}, {}))
    back = read_part(tmp_path / "syncer", files)
    assert back.arrays["fragment/0/0"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.arrays["fragment/0/0"], np.asarray(value))
    bare = write_part(tmp_path, "bare", SnapshotPart({}, STATE))
    assert read_part(tmp_path / "bare", bare) == SnapshotPart({}, STATE)


def test_a_part_that_is_not_there_is_told(copied):
    with pytest.raises(SnapshotError, match="has no part learner_007"):
        copied[0].newest(nobody_warns).part("learner_007")


def test_every_byte_of_the_manifest_counts(tmp_path):
    store = SnapshotStore(tmp_path, keep=1)
    store.complete(1, {"step": 4}, {"job": write_part(tmp_path / "000001", "job", SnapshotPart({}, STATE))})
    assert store.newest(nobody_warns).number == 1
    path = tmp_path / "000001" / MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert "manifest.json is damaged" in skipped(store), f"byte {at}"


@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_a_changed_byte_of_any_file_is_never_used(pristine, tmp_path_factory, chance):
    folder = tmp_path_factory.mktemp("flipped") / "snapshots"
    shutil.copytree(pristine, folder)
    store = SnapshotStore(folder, keep=1)
    for path in files_of(folder):
        whole = path.read_bytes()
        at = chance.randrange(len(whole))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ chance.randrange(1, 256)]))
        assert path.name in skipped(store)
        path.write_bytes(whole)
    assert store.newest(nobody_warns).number == 1
    shutil.rmtree(folder)


@pytest.mark.parametrize("harm", ["shorter", "longer", "empty", "gone", "joined", "linked"])
def test_a_file_cut_off_gone_added_or_replaced_is_never_used(copied, harm):
    store, folder = copied
    for number, path in enumerate(files_of(folder)):
        whole = path.read_bytes()
        strange = path.with_name(f"strange{number}")
        if harm == "joined":
            strange.write_bytes(b"")
        elif harm == "linked":
            strange.symlink_to(folder, target_is_directory=True)
        elif harm == "gone":
            path.unlink()
        else:
            path.write_bytes({"shorter": whole[:-1], "longer": whole + b"0", "empty": b""}[harm])
        assert str(folder) in skipped(store)
        strange.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert store.newest(nobody_warns).number == 1


def test_a_whole_part_that_is_gone_or_another_is_never_used(copied):
    store, folder = copied
    (folder / "syncer").rename(folder / "learner_001")
    assert "learner_001" in skipped(store)
    shutil.rmtree(folder / "learner_001")
    assert "syncer" in skipped(store)


def test_a_snapshot_under_another_number_is_never_used(copied):
    store, folder = copied
    folder.rename(folder.with_name("000002"))
    assert "of another snapshot" in skipped(store)


def test_a_snapshot_of_an_earlier_format_is_refused_in_a_line(copied, monkeypatch):
    copied_store, _ = copied
    with monkeypatch.context() as earlier:
        earlier.setattr(store, "_FORMAT", 2)
        copied_store.complete(2, HEADER, written(copied_store.folder, 2))
    assert "manifest.json is of format 2, but must be of 3; this snapshot is skipped" in skipped(copied_store)


def test_what_changes_after_it_was_opened_is_still_never_used(copied):
    store, folder = copied
    snapshot = store.newest(nobody_warns)
    for path in files_of(folder / "learner_000"):
        whole = path.read_bytes()
        for at in random.Random(0).sample(range(len(whole)), min(4, len(whole))):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
            with pytest.raises(SnapshotError, match=f"{path.name} is damaged$"):
                snapshot.part("learner_000")
        path.write_bytes(whole)


def test_the_newest_complete_one_is_taken(copied):
    store = SnapshotStore(copied[0].folder, keep=3)
    store.complete(2, HEADER, written(store.folder, 2, ["syncer"]))
    written(store.folder, 3, ["syncer"])
    warnings = []
    assert store.newest(warnings.append).number == 2
    assert len(warnings) == 1
    assert "000003" in warnings[0]
    assert "incomplete" in warnings[0]
    assert store.next_number() == 4
    assert store.next_number() == 5


@pytest.mark.parametrize(
    ("name", "array", "sound"),
    [
        ("params/layer_0.w", np.float32([[1, np.nan]]), False),
        ("params/layer_0", np.float32(np.nan), False),
        ("residual/0/0", np.float32([np.inf]), False),
        ("inner/0", np.float32([np.inf]), False),
        ("inner/0", np.float32(np.inf), True),  # an optimizer's best loss so far, before there is one
    ],
)
def test_one_that_is_not_finite_is_skipped_and_its_array_named(name, array, sound, copied):
    store = SnapshotStore(copied[0].folder, keep=3)
    part = SnapshotPart({**ARRAYS, name: array}, STATE)
    store.complete(2, HEADER, {"learner_000": write_part(store.folder / "000002", "learner_000", part)})
    warnings = []
    assert store.newest(warnings.append).number == (2 if sound else 1)
    snapshot = store.open(2, own=lambda part: False)  # as of others' parts, which they check themselves
    if sound:
        assert snapshot.part("learner_000").arrays[name] == array
    else:
        said = f"{name} holds numbers that are not finite"
        assert said in warnings[0] and said in refusal(SnapshotError, snapshot.part, "learner_000")


def test_nothing_is_there_before_the_first(tmp_path):
    store = SnapshotStore(tmp_path / "snapshots", keep=1)
    assert store.newest(nobody_warns) is None
    assert store.next_number() == 1


def stale_handle(path):
    raise OSError(errno.ESTALE, "Stale file handle")


def test_a_disk_that_cannot_be_read_for_a_while_costs_no_more_than_a_snapshot(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path, keep=1)
    written(tmp_path, 3, ["syncer"])
    assert store.last_number() == 3
    with monkeypatch.context() as stale:
        stale.setattr(pathlib.Path, "iterdir", stale_handle)
        assert (store.last_number(), store.next_number()) == (3, 4)
    assert store.next_number() == 5


def test_a_snapshot_is_complete_though_older_ones_cannot_be_listed(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path, keep=1)
    store.complete(1, HEADER, written(tmp_path, 1, ["syncer"]))
    parts = written(tmp_path, 2, ["syncer"])
    with monkeypatch.context() as stale:
        stale.setattr(pathlib.Path, "iterdir", stale_handle)
        store.complete(2, HEADER, parts)  # else the parts of it would be removed
    assert store.newest(nobody_warns).number == 2
    store.complete(3, HEADER, written(tmp_path, 3, ["syncer"]))
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]


@pytest.mark.parametrize("unread", [(1, 2, 3), (3,)])
def test_a_manifest_that_cannot_be_read_for_a_while_costs_no_complete_snapshot(unread, tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path, keep=3)
    for number in (1, 2):
        store.complete(number, HEADER, written(tmp_path, number, ["syncer"]))
    read = pathlib.Path.read_bytes

    def refused(path):
        if path.name == MANIFEST and int(path.parent.name) in unread:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", refused)
    store.complete(3, HEADER, written(tmp_path, 3, ["syncer"]))
    monkeypatch.undo()
    assert store.open(3).header["step"] == HEADER["step"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001", "000002", "000003"]


def test_so_many_stay_and_what_is_incomplete_or_damaged_goes(tmp_path):
    store = SnapshotStore(tmp_path, keep=2)
    for number in (1, 2, 4, 5):
        parts = written(tmp_path, number, ["syncer"])
        store.complete(number, HEADER, parts)
        if number == 2:
            written(tmp_path, 3, ["syncer"])
        if number == 4:
            (tmp_path / "000004" / MANIFEST).write_bytes(b"{}")
            written(tmp_path, 6, ["syncer"])
    # 6 is not complete, but newer: it is being written.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000005", "000006"]
    store.discard(6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000005"]
    assert store.next_number() == 6


def test_the_snapshot_with_which_tapes_begin_stays_beside_the_newest(tmp_path):
    store = SnapshotStore(tmp_path, keep=1, keep_also=SnapshotName(1, "ab" * 32))
    for number in (1, 2, 3):
        store.complete(number, HEADER, written(tmp_path, number, ["syncer"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]


def test_a_crash_at_any_moment_of_writing_leaves_the_last_complete_one(copied, monkeypatch):
    store, folder = copied
    parts = written(store.folder, 2)
    newest = store.folder / "000002"
    for path in reversed(files_of(newest)):  # as if they had not been written yet
        path.unlink()
        with pytest.raises(SnapshotError, match=r"cannot be completed: [a-z0-9_/.]+ is missing$"):
            store.complete(2, HEADER, parts)
        warnings = []
        assert store.newest(warnings.append).number == 1
        assert len(warnings) == 1
    assert folder.is_dir()


def test_states_of_no_one_moment_are_not_completed(tmp_path):
    store = SnapshotStore(tmp_path, keep=1)
    ahead = dataclasses.asdict(Clocks(VectorClock({0: (0, 9)}), {0: VectorClock({0: (0, 5)})}))
    with pytest.raises(SnapshotError, match="no consistent cut"):
        store.complete(1, {"clocks": ahead}, written(tmp_path, 1))
    assert "incomplete" in skipped(store)


def test_an_error_of_the_disk_comes_out_of_the_future_and_costs_no_snapshot(copied, monkeypatch):
    store, _ = copied
    staging = parts.parts_folder(store.folder)
    writer = PartWriter(staging)
    staging.mkdir()
    (staging / "000002").write_text("a file where a folder should be")
    with pytest.raises(SnapshotError, match="cannot be written"):
        writer.write(2, "syncer", SnapshotPart(ARRAYS, STATE)).result()
    files = writer.write(3, "syncer", SnapshotPart(ARRAYS, STATE)).result()
    assert store.newest(nobody_warns).number == 1
    (staging / "000003").rename(store.folder / "000003")
    store.complete(3, HEADER, {"syncer": files})
    assert store.newest(nobody_warns).number == 3
    writer.close(timeout=10)
    with pytest.raises(SnapshotError, match="closed"):
        writer.write(4, "syncer", SnapshotPart(ARRAYS, STATE)).result()


def test_a_writer_removes_what_it_left_of_earlier_snapshots_and_nothing_of_others(tmp_path):
    """A disk that the syncer does not see is cleared by nobody else, and would fill up."""
    writer, part = PartWriter(tmp_path), SnapshotPart({}, STATE)
    for number, name in ((1, "learner_000"), (2, "learner_000"), (2, "learner_001"), (9, "learner_000")):
        write_part(tmp_path / f"{number:06d}", name, part)
    (tmp_path / "000002" / "learner_000" / ".host_000.ab.new").touch()  # as a kill leaves it
    (tmp_path / "000002" / "learner_0001").mkdir()  # another's
    writer.write(3, "learner_000", part).result()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    others = {"000002/learner_001", "000002/learner_0001", "000009/learner_000"}
    assert left == {"000003/learner_000", *others}
    assert not (tmp_path / "000001").exists()
    writer.close(timeout=10)


def test_a_part_that_cannot_be_written_does_not_stay_in_memory(tmp_path, monkeypatch):
    """It may be all of a learner's devices: with it there they would have no room for the next one's copy."""
    writer, held = PartWriter(tmp_path), []

    def full(path, pieces):
        for piece in pieces:
            assert piece is not None
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(array_file, "replace", full)
    for number in (1, 2):
        array = np.zeros(9, np.float32)
        held.append(weakref.ref(array))
        future = writer.write(number, "learner_000", SnapshotPart({"params/w": array}, STATE))
        del array
        with pytest.raises(SnapshotError, match="No space left"):
            future.result(60)
        until(lambda: held[-1]() is None, "the end of the copy")
    assert "No space left" in str(future.exception())
    writer.close(timeout=10)


def test_closing_waits_for_what_is_being_written_and_cancels_the_rest(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def slowly(snapshot, name, part):
        begun.set()
        assert go.wait(60)
        return name

    monkeypatch.setattr(parts, "write_part", slowly)
    writer = PartWriter(tmp_path)
    first, second = (writer.write(1, name, SnapshotPart({}, {})) for name in ("syncer", "learner_000"))
    assert begun.wait(60)
    second.add_done_callback(lambda _: go.set())  # once it is cancelled the first may end
    writer.close(timeout=60)
    assert first.result(timeout=0) == "syncer"
    assert second.cancelled()


@pytest.mark.parametrize("name", ["", "../syncer", "Syncer", "a b", "x" * 65])
def test_a_part_has_a_plain_name(tmp_path, name):
    with pytest.raises(SnapshotError):
        write_part(tmp_path / "000001", name, SnapshotPart({}, {}))
    assert not list(tmp_path.rglob("*"))


def test_files_of_a_part_go_over_the_wire(tmp_path):
    files = write_part(tmp_path, "syncer", SnapshotPart(ARRAYS, STATE))
    assert PartFiles.from_json(files.to_json()) == files


GOOD = {"files": {"state.json": [3, "f" * 64]}}
BAD_PATHS = ("../x", "/etc/passwd", "a//b", "a/./b", "", "a\0b", "a\\b")


@pytest.mark.parametrize(
    "told",
    [
        *(None, 7, [], {}, {**GOOD, "files": {}}, {**GOOD, "more": 1}),
        *({**GOOD, "files": {path: [3, "f" * 64]}} for path in BAD_PATHS),
        *({**GOOD, "files": {"x": told}} for told in ([-1, "f" * 64], [True, "f" * 64], [3, "F" * 64])),
        *({**GOOD, "files": {"x": told}} for told in ([3], 3, [3, None])),
    ],
)
def test_files_that_cannot_be_are_told_in_one_line(told):
    assert PartFiles.from_json(GOOD).to_json() == GOOD
    with pytest.raises(ValueError, match="describes a part"):
        PartFiles.from_json(told)


def test_numbers_count_up_past_six_digits(tmp_path):
    for name in ("999999", "1000000", "0000007", "backup", "42"):
        (tmp_path / name).mkdir()
    store = SnapshotStore(tmp_path, keep=1)
    assert list(itertools.islice(iter(store.next_number, None), 2)) == [1000001, 1000002]
