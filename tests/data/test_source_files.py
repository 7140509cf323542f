"""Which files a path names: what exists is no pattern, and each real file is read once."""

import os
import pathlib

import pytest

from ddiloco.data.errors import DataError
from ddiloco.data.source_files import text_files


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names):
    for name in names:
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(pattern):
    return [str(path) for path in text_files(pattern)]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("./run[1]", ["run[1]/a[2].txt", "run[1]/b.txt"]),
        ("./run[1]/", ["run[1]/a[2].txt", "run[1]/b.txt"]),
        ("./run[1]/a[2].txt", ["run[1]/a[2].txt"]),
        ("./run[1]/*.txt", ["run[1]/a[2].txt", "run[1]/b.txt"]),
        ("./run[1]/**", ["run[1]/a[2].txt", "run[1]/b.txt"]),
        ("./*/a[2].txt", ["run[1]/a[2].txt"]),
        ("./**/a[2].txt", ["run[1]/a[2].txt"]),
        ("./run[1]/../run[12]/*.txt", ["run1/c.txt"]),
        ("./q?.txt", ["q?.txt"]),
        ("./s*r", ["s*r/d.txt"]),
    ],
)
def test_a_path_that_exists_is_never_a_pattern(pattern, found):
    make("run[1]/a[2].txt", "run[1]/b.txt", "run1/c.txt", "q?.txt", "qa.txt", "s*r/d.txt", "star/e.txt")
    assert [os.path.normpath(name) for name in names(pattern)] == found
    assert [os.path.relpath(name) for name in names(os.path.abspath(pattern))] == found


def test_a_file_is_read_once_whatever_links_lead_to_it():
    make("top/z/real.txt", "elsewhere/far.txt")
    os.symlink(os.path.abspath("top/z"), "top/a")
    os.symlink("z/real.txt", "top/0.txt")
    os.link("top/z/real.txt", "top/z/same.txt")
    os.symlink("..", "top/z/up")
    os.symlink("../elsewhere", "top/outside")
    for pattern in ("./top", "./top/**", "./top/**/*.txt", "./top/*/*.txt"):
        assert names(pattern) == ["top/outside/far.txt", "top/z/real.txt"]
    assert names("./top/0.txt") == ["top/0.txt"]
    os.symlink("../top", "elsewhere/top")  # a circle
    assert names("./top") == ["top/outside/far.txt", "top/z/real.txt"]


def test_a_link_that_leads_nowhere_and_what_is_no_file_are_refused():
    make("top/a.txt")
    os.symlink("gone", "top/b.txt")
    for pattern in ("./top", "./top/b.txt", "./top/*.txt"):
        with pytest.raises(DataError, match=r"top/b.txt: is a link to gone, which is not there$"):
            text_files(pattern)
    os.mkfifo("pipe")
    with pytest.raises(DataError, match=r"^config.data.name: ./pipe: is no regular file$"):
        text_files("./pipe")


def test_of_a_hub_cache_one_snapshot_is_to_be_named():
    make("hub/version.txt", "hub/a/blobs/old", "hub/a/blobs/new", "hub/a/refs/main")
    for snapshot, blob in {"c1": "old", "c2": "new"}.items():
        pathlib.Path(f"hub/a/snapshots/{snapshot}").mkdir(parents=True)
        os.symlink(f"../../blobs/{blob}", f"hub/a/snapshots/{snapshot}/a.jsonl")
    for pattern in ("./hub", "./hub/a"):
        with pytest.raises(
            DataError, match=r"hub/a: is a cache of the .* a folder in its snapshots: c1, c2$"
        ):
            text_files(pattern)
    assert names("./hub/a/snapshots/c1") == ["hub/a/snapshots/c1/a.jsonl"]
