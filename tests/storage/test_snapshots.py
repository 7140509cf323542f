"""Snapshots on disk: complete once the header is there, kept as many as wanted, refused if damaged."""

import pytest

from ddiloco.storage import array_file
from ddiloco.storage.run_mark import FRAGMENT
from ddiloco.storage.snapshots import SnapshotError, SnapshotHeader, SnapshotStore
from tests.storage.test_fragment_history import THETA

HEADER = SnapshotHeader("run", 12, 100.0, (0,), {"seed": 1})


def taken(store):
    """The number of a snapshot of one fragment that is complete."""
    number = store.begin()
    (store.at(number) / "syncer").mkdir()
    path = store.at(number) / "syncer" / "fragment-0000"
    array_file.save(path, FRAGMENT, {"version": 1}, [*THETA.values()])
    store.complete(number, HEADER)
    return number


def there(store):
    return sorted(int(path.name) for path in store.folder.iterdir())


def test_one_is_complete_with_its_header_and_all_that_was_written_before(tmp_path):
    store = SnapshotStore(tmp_path, keep=2)
    snapshot = store.open(taken(store))
    snapshot.check()
    assert (snapshot.header.run, snapshot.header.step, snapshot.header.learners) == ("run", 12, (0,))
    assert list(snapshot.header.files) == ["syncer/fragment-0000"]


def test_a_number_that_was_begun_is_not_given_again_and_is_no_snapshot(tmp_path):
    store = SnapshotStore(tmp_path, keep=2)
    first, begun = taken(store), store.begin()
    assert (first, begun, SnapshotStore(tmp_path, keep=2).begin()) == (1, 2, 3)
    with pytest.raises(SnapshotError, match=r"000002: is not there, or incomplete: complete are 1$"):
        store.open(begun)
    with pytest.raises(SnapshotError, match=r"there is no complete one"):
        SnapshotStore(tmp_path / "elsewhere", keep=1).open(1)


@pytest.mark.parametrize(("keep", "left"), [(1, [5, 6]), (2, [4, 5, 6]), (9, [1, 2, 4, 5, 6])])
def test_the_newest_stay_and_what_is_incomplete_before_them_goes(tmp_path, keep, left):
    store = SnapshotStore(tmp_path, keep)
    for _ in range(2):
        taken(store)
    store.begin()
    for _ in range(2):
        taken(store)
    assert store.begin() == 6
    assert there(store) == left
    assert [path.name for path in store.later(5)] == ["000006"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has .* bytes, and had"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
            "is damaged: its checksum does not fit",
        ),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_one_with_a_damaged_file_is_refused_by_name(tmp_path, damage, told):
    store = SnapshotStore(tmp_path, keep=1)
    snapshot = store.open(taken(store))
    damage(snapshot.folder / "syncer" / "fragment-0000")
    with pytest.raises(SnapshotError, match=f"000001: cannot be used: syncer/fragment-0000: {told}"):
        snapshot.check()


def test_a_damaged_header_is_named(tmp_path):
    store = SnapshotStore(tmp_path, keep=1)
    path = store.at(taken(store)) / "snapshot.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))
    with pytest.raises(SnapshotError, match=r"cannot be used: snapshot\.json: is damaged"):
        store.open(1)
