"""The file under a tape: what was written is read back, and no byte can be changed unseen."""

import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.storage.tape.file import HEAD_BYTES, MAGIC, TapeError, TapeFile, read
from tests.long import times

PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


def written(path, payloads):
    file = TapeFile(path)
    for payload in payloads:
        file.append(payload)
    file.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tapes")


def fresh(folder):
    return pathlib.Path(tempfile.mkdtemp(dir=folder)) / "a.tape"


@settings(max_examples=times(15, 100))
@given(PAYLOADS)
def test_a_file_cut_at_any_byte_gives_the_records_before_it(folder, payloads):
    path = fresh(folder)
    data = written(path, payloads)
    ends = [len(MAGIC)]
    for payload in payloads:
        ends.append(ends[-1] + HEAD_BYTES + len(payload))
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        content = read(path)
        whole = sum(end <= cut for end in ends[1:])
        assert [record.payload for record in content.records] == payloads[:whole]
        assert content.torn == (cut - ends[whole] if cut >= len(MAGIC) else cut)


@settings(max_examples=times(15, 100))
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.integers(1, 255))
def test_any_byte_changed_is_told_with_the_file(folder, payloads, change):
    path = fresh(folder)
    data = written(path, payloads)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])
        with pytest.raises(TapeError, match=rf"{path}: byte \d+: is "):
            read(path)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=2, max_size=4, unique=True))
def test_a_record_left_out_or_moved_is_told(folder, payloads):
    path = fresh(folder)
    data = written(path, payloads)
    start = len(MAGIC)
    first = data[start : start + HEAD_BYTES + len(payloads[0])]
    rest = data[start + len(first) :]
    for changed in (rest, rest + first):
        path.write_bytes(MAGIC + changed)
        with pytest.raises(TapeError):
            read(path)


def test_a_tape_that_is_there_is_never_written_over(tmp_path):
    written(tmp_path / "a.tape", [b"one"])
    with pytest.raises(FileExistsError):
        TapeFile(tmp_path / "a.tape")


def test_a_file_that_is_not_there_or_is_no_tape_is_told_in_a_line(tmp_path):
    with pytest.raises(TapeError, match=r"a\.tape: cannot be read: No such file"):
        read(tmp_path / "a.tape")
    (tmp_path / "b.tape").write_bytes(b"something else, and long enough")
    with pytest.raises(TapeError, match=r"b\.tape: byte 0: is no tape"):
        read(tmp_path / "b.tape")
