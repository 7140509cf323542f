"""Files that only grow: every byte once and in order, whatever the disk does in between."""

import errno
import os
import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.telemetry import files
from ddiloco.telemetry.alarms import Alarms
from ddiloco.telemetry.files import GrowingFile, GrowingFiles
from tests.long import times


class FaultyDisk:
    """Opens a file for a GrowingFile whose writes take so many bytes each; None: the disk is full."""

    def __init__(self, monkeypatch, takes):
        self.takes = takes
        real = GrowingFile._open
        monkeypatch.setattr(GrowingFile, "_open", lambda file: self.wrap(real(file)))

    def wrap(self, file):
        self.file = file
        return self

    def write(self, data):
        takes = self.takes.pop(0) if self.takes else len(data)
        if takes is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data[: max(1, takes)])

    def close(self):
        self.file.close()


steps = st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from(["flush", "close"]))
disk = st.lists(st.one_of(st.none(), st.integers(1, 12)), max_size=20)


@settings(max_examples=times(60, 150))
@given(st.lists(steps, max_size=20), disk)
def test_every_byte_is_written_once_and_in_order_however_writes_fail_or_stop_half_way(script, takes):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = pathlib.Path(folder) / "deep" / "file"
        FaultyDisk(patch, takes)
        file, told = GrowingFile(path), b""
        for step in script:
            try:
                if isinstance(step, bytes):
                    file.append(step)
                    told += step
                else:
                    getattr(file, step)()
            except OSError as error:
                assert error.errno == errno.ENOSPC
            written = path.read_bytes() if path.exists() else b""
            assert told.startswith(written)
            assert len(written) + file.pending == len(told)
        takes.clear()
        file.close()
        assert file.pending == file.lost == 0
        assert (path.read_bytes() if told else b"") == told and path.exists() == bool(told)


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", b""),
        (b"torn", b""),
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb\nto", b"a\nb\n"),
        (b"a\n" + 9999 * b"t", b"a\n"),
    ],
)
def test_the_torn_line_that_a_killed_process_left_is_cut_off(tmp_path, left, kept):
    path = tmp_path / "file.jsonl"
    path.write_bytes(left)
    file = GrowingFile(path)
    file.append(b"new\n")
    file.close()
    assert path.read_bytes() == kept + b"new\n"


def test_whole_records_are_given_up_and_counted_once_too_much_is_pending(tmp_path, monkeypatch):
    takes = [None]
    FaultyDisk(monkeypatch, takes)
    monkeypatch.setattr(files, "MAX_PENDING", 10)
    file = GrowingFile(tmp_path / "file")
    for record in (b"first", b"second", b"third", b"4"):
        file.append(record)
    assert (file.pending, file.lost) == (10, 7)
    with pytest.raises(OSError):
        file.flush()
    file.append(b"fifth")
    file.flush()
    file.append(b"sixth")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"firstthirdsixth"
    assert file.lost == 12


def test_a_full_disk_is_one_alarm_for_a_folder_and_a_file_that_can_be_written_is(tmp_path):
    told = []
    alarms = Alarms(told.append)
    growing = GrowingFiles(tmp_path, alarms)
    for name in ("blocked", "free", "also_blocked"):
        growing.append(name, b"x")
    for name in ("blocked", "also_blocked"):
        (tmp_path / name).mkdir()
    growing.flush()
    growing.flush()
    assert (tmp_path / "free").read_bytes() == b"x"
    assert told == alarms.sentences
    assert len(told) == 1 and told[0].startswith(f"{tmp_path}: IsADirectoryError: ")
    (tmp_path / "also_blocked").rmdir()
    growing.close()
    assert (tmp_path / "also_blocked").read_bytes() == b"x"


def test_giving_records_up_is_an_alarm(tmp_path):
    told = []
    growing = GrowingFiles(tmp_path, Alarms(told.append))
    growing.append("file", bytes(1 << 24))
    growing.append("file", b"too much")
    growing.flush()
    assert told == [f"{tmp_path / 'file'}: records were given up, 0 bytes are waiting"]
    assert (tmp_path / "file").stat().st_size == 1 << 24


def test_a_bounded_file_takes_no_more_records_than_it_may_hold_and_that_is_one_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    for _ in range(2):  # the second process counts what the first has left
        told = []
        growing = GrowingFiles(tmp_path, Alarms(told.append))
        for name, bounded in (("learner", True), ("syncer", False)):
            for record in (b"12345\n", b"6789\n", b"0\n"):
                growing.append(name, record, bounded=bounded)
        growing.flush()
        growing.close()
        assert told == [f"{tmp_path / 'learner'}: has grown to 0 MiB, and takes no more records"]
        assert (tmp_path / "learner").read_bytes() == b"12345\n"
    assert (tmp_path / "syncer").read_bytes() == 2 * b"12345\n6789\n0\n"


def test_torn_lines_and_bytes_of_no_text_have_no_values(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n{"a": "\xff"}\n{"a": 2}\n{"a":')
    assert [line for line, values in files.read_lines(path) if not values] == ["��\n", "[1]\n", '{"a":']
    assert list(files.read_values(path)) == [{"a": 1}, {"a": "�"}, {"a": 2}]
    assert list(files.read_values(tmp_path / "none")) == []


def test_lines_that_the_disk_does_not_give_are_not_taken_for_none(tmp_path):
    with pytest.raises(OSError, match="directory"):
        list(files.read_values(tmp_path))
