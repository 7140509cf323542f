"""The embedded data set: which files, in which split, prepared once and whole."""

import fcntl
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig

import pytest

from ddiloco.data import preparation, stdlib_text
from ddiloco.data.errors import DataError
from ddiloco.data.sources import open_text
from ddiloco.telemetry import waits

ROOT = pathlib.Path(sysconfig.get_path("stdlib"))

COUNT = 300
FEW = f"""
import itertools, os, signal, sys
from ddiloco.data import sources, stdlib_text
whole = stdlib_text.documents
stdlib_text.documents = lambda root: itertools.islice(whole(root), {COUNT})
"""
OPEN = (
    FEW
    + """
print(len(sources.open_text("stdlib_text", "train", sys.argv[1])))
"""
)
KILLED = (
    FEW
    + f"""
def halfway(root):
    for count, document in enumerate(whole(root)):
        if count == {COUNT}: os.kill(os.getpid(), signal.SIGKILL)
        yield document
stdlib_text.documents = halfway
sources.open_text("stdlib_text", "train", sys.argv[1])
"""
)


@pytest.fixture
def few(monkeypatch):
    """The first documents stand for all."""
    whole = stdlib_text.documents
    monkeypatch.setattr(stdlib_text, "documents", lambda root: itertools.islice(whole(root), COUNT))


def spawn(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(data_dir, split):
    builder = stdlib_text.StdlibText(data_dir=data_dir, file_format="array_record")
    return list(builder.as_data_source(split))


def make_library(root, files):
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def test_splits_hold_every_kept_file_once_and_byte_for_byte(data_dir):
    train, held_out = (records(data_dir, split) for split in ("train", "validation"))
    stored = [(r["path"].decode(), r["text"]) for r in (*train, *held_out)]
    assert sorted(stored) == [(path, text.encode()) for path, text in stdlib_text.documents(ROOT)]
    assert len(stored) == len({path for path, _ in stored}) == len({text for _, text in stored})
    assert sum(len(r["text"]) for r in train) > 8e6 and 0.02 < len(held_out) / len(stored) < 0.09
    assert [r["path"] for r in train] == sorted(r["path"] for r in train)
    for path, text in stored[::50]:
        assert (ROOT / path).read_bytes() == text


def test_packages_tests_caches_and_odd_files_are_left_out(tmp_path):
    make_library(
        tmp_path,
        {
            "a.py": b"a = 1\n",
            "b/__init__.py": b"",
            "b/test/kept.py": b"kept = 1\n",
            "b/__pycache__/c.py": b"c = 1\n",
            "copy_of_a.py": b"a = 1\n",
            "latin.py": b"# \xe9\n",
            "note.txt": b"text\n",
            "site-packages/d.py": b"d = 1\n",
            "test/e.py": b"e = 1\n",
        },
    )
    assert list(stdlib_text.documents(tmp_path)) == [("a.py", "a = 1\n"), ("b/test/kept.py", "kept = 1\n")]


def test_the_split_depends_on_the_path_alone():
    known = {"abc.py": "train", "json/decoder.py": "train"}
    assert {path: stdlib_text.split_of(path) for path in known} == known
    held_out = sum(stdlib_text.split_of(f"module_{i}.py") == "validation" for i in range(4000))
    assert 130 < held_out < 270


def test_processes_that_prepare_at_once_all_succeed_and_print_nothing(tmp_path):
    processes = [spawn(OPEN, tmp_path) for _ in range(2)]
    answers = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert {err for _, err in answers} == {""}
    [counted] = {int(out) for out, _ in answers}
    assert counted > 100
    assert not list(tmp_path.rglob("incomplete*"))


def test_a_killed_preparation_leaves_nothing_that_is_taken_for_data(few, tmp_path):
    process = spawn(KILLED, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("incomplete*")), "the process died before it had begun to write"
    assert not list(tmp_path.rglob("dataset_info.json"))

    assert len(open_text("stdlib_text", "train", tmp_path)) > 100
    assert not list(tmp_path.rglob("incomplete*"))


def test_waiting_for_another_preparation_is_bounded(few, tmp_path):
    builder = stdlib_text.StdlibText(data_dir=tmp_path, file_format="array_record")
    folder = pathlib.Path(builder.data_dir).parent
    folder.mkdir(parents=True)
    with open(folder / ".prepare.lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process has been preparing"):
            preparation.prepare(builder, wait_seconds=0.1, progress=False)
    preparation.prepare(builder, wait_seconds=0.1, progress=False)
    assert preparation.is_prepared(builder.data_dir)


def test_who_prepares_waits_for_nobody(tmp_path):
    with preparation.sole_preparer(tmp_path, wait_seconds=0.1):
        assert not waits.PROCESS._under_way
