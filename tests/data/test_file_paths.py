"""Which files a path names: what exists is no pattern, and each real file is read once."""

import os
import pathlib

import pytest

from ddiloco.data.errors import DataError
from ddiloco.data.file_paths import text_files


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


def hub_cache(folder, main="c2"):
    """A repository in the hub's cache: snapshot c1 has an older a.jsonl, c2 has it anew and b.jsonl."""
    make(*(f"{folder}/blobs/{blob}" for blob in ("old", "new", "b")), f"{folder}/refs/pr/1")
    for snapshot, files in {"c1": {"a": "old"}, "c2": {"a": "new", "b": "b"}}.items():
        pathlib.Path(f"{folder}/snapshots/{snapshot}/data").mkdir(parents=True)
        for name, blob in files.items():
            os.symlink(f"../../../blobs/{blob}", f"{folder}/snapshots/{snapshot}/data/{name}.jsonl")
    if main:
        pathlib.Path(folder, "refs/main").write_text(main)


def test_of_a_hub_cache_the_snapshot_alone_is_read():
    make("hub/version.txt", "hub/CACHEDIR.TAG")
    hub_cache("hub/datasets--a--b")
    hub_cache("hub/models--c", main="c1")
    newest = [f"hub/datasets--a--b/snapshots/c2/data/{name}.jsonl" for name in "ab"]
    older = "snapshots/c1/data/a.jsonl"
    assert names("./hub") == [*newest, f"hub/models--c/{older}"]
    for pattern in ("", "/snapshots", "/**/*.jsonl", "/snapshots/*/data/*", "/snapshots/c2"):
        assert names(f"./hub/datasets--a--b{pattern}") == newest
    assert names("./hub/datasets--a--b/snapshots/c1") == [f"hub/datasets--a--b/{older}"]
    os.symlink("hub/models--c", "mine")
    assert names("./mine") == [f"mine/{older}"]


def test_a_hub_cache_of_one_snapshot_or_of_copies_needs_no_main():
    make("cache/snapshots/c1/a.jsonl", "cache/refs/pr/1", "cache/blobs/b")
    assert names("./cache") == ["cache/snapshots/c1/a.jsonl"]
    make("cache/snapshots/c2/a.jsonl")
    with pytest.raises(DataError, match=r"/cache: has the snapshots c1, c2, and refs/main is none of them"):
        text_files("./cache")
