"""Folders that cannot be written to are found by trying, with what is in the way."""

import errno
import os

import pytest

from ddiloco.storage.workdir import check_folder, check_inside, free_bytes, make_folder
from tests.small_disks import fill, small_disk


@pytest.fixture
def place(tmp_path):
    """A folder with what can be in the way: a file, links to nothing, and a link to a folder."""
    (tmp_path / "file").touch()
    (tmp_path / "nothing").symlink_to(tmp_path / "gone" / "x")
    (tmp_path / "again").symlink_to("nothing")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    return tmp_path


WRONG = {
    "file": (errno.ENOTDIR, "{}/file is there, and is no folder"),
    "file/sub": (errno.ENOTDIR, "{}/file is there, and is no folder"),
    "nothing": (errno.ENOENT, "{0}/nothing is a link to {0}/gone/x, which is not there"),
    "nothing/sub": (errno.ENOENT, "{0}/nothing is a link to {0}/gone/x, which is not there"),
    "again": (errno.ENOENT, "{}/again is a link to nothing, which is not there"),
    "round": (errno.ENOENT, "{}/round is a link to round, which is not there"),
    "a" * 256: (errno.ENAMETOOLONG, "its name has 256 bytes, and may have 255"),
    "new/" + "ä" * 128: (errno.ENAMETOOLONG, "its name has 256 bytes, and may have 255"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_in_the_way_is_named_and_nothing_is_made(name, place):
    code, told = WRONG[name]
    before = sorted(place.rglob("*"))
    for call in (check_folder, make_folder):
        with pytest.raises(OSError) as raised:
            call(place / name)
        assert (raised.value.errno, raised.value.strerror) == (code, told.format(place))
    assert sorted(place.rglob("*")) == before


def test_a_path_that_has_no_room_for_what_is_below_it_is_too_long(tmp_path):
    deep = tmp_path.joinpath(*["b" * 200] * 19, "b" * 60)
    with pytest.raises(OSError, match=r"its path has .* bytes, and may have 38") as raised:
        make_folder(deep)
    assert raised.value.errno == errno.ENAMETOOLONG
    assert not any(tmp_path.iterdir())


def test_what_is_there_must_be_of_its_kind(place):
    check_inside(place, {"file": False, "real": True, "link": True, "absent": True, "new": False})
    for names, told in (
        ({"file": True}, "file is there, and is no folder"),
        ({"nothing": True}, "which is not there"),
        ({"real": False}, "real is there, and is a folder"),
    ):
        with pytest.raises(OSError, match=told):
            check_inside(place, names)


def test_free_bytes_are_those_of_the_disk_that_a_folder_would_be_on(tmp_path):
    with small_disk(tmp_path / "small", "64k") as small:
        fill(small / "ballast", leave=0)
        assert free_bytes(small / "not" / "yet") == (os.stat(small).st_dev, 0)
    assert free_bytes(tmp_path / "not")[1] > 0
