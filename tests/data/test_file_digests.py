"""Files that change are prepared again; files that do not are not, wherever they are."""

import json
import os
import shutil

import pytest

from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.source_files import file_digests
from ddiloco.data.sources import open_text
from ddiloco.data.text_files import TextFiles, text_files
from ddiloco.data.tokenized import open_tokens, write
from ddiloco.data.tokenizers import ByteTokenizer


def fill(path, word):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"document {n:03d} {word}"}) + "\n" for n in range(500)))


def words(source):
    return {source[i]["text"].split()[-1] for i in range(len(source))}


@pytest.fixture
def opened(tmp_path):
    return lambda: open_text(str(tmp_path / "texts"), "train", tmp_path / "data[1]")


def test_an_edit_is_seen_whatever_size_and_times_say(tmp_path, opened):
    file = tmp_path / "texts/a.jsonl"
    fill(file, "AAAA")
    first = opened()
    assert words(first) == {b"AAAA"}
    before = file.stat()
    text = file.read_text()
    middle = slice(4200, -4200)  # beyond the first and last 4 KiB
    file.write_text(text[: middle.start] + text[middle].replace("A", "B") + text[middle.stop :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    second = opened()
    assert words(second) >= {b"AAAA", b"BBBB"}
    assert second.full_name != first.full_name


def test_copies_and_touched_files_are_the_same_data_set(tmp_path, opened):
    fill(tmp_path / "texts/a.jsonl", "word")
    first = opened()
    os.utime(tmp_path / "texts/a.jsonl", (1, 1))
    assert opened().full_name == first.full_name
    shutil.copytree(tmp_path / "texts", tmp_path / "copy")
    os.utime(tmp_path / "copy/a.jsonl", (2, 2))
    elsewhere = open_text(str(tmp_path / "copy"), "train", tmp_path / "other data")
    assert elsewhere.full_name == first.full_name


def test_a_file_that_is_as_recorded_is_not_read_again(tmp_path):
    file, root = tmp_path / "texts/a.jsonl", tmp_path / "data"
    fill(file, "word")
    record = file_digests(str(file), "text", root, [file]).record
    status = file.stat()
    known = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, "recorded"]
    record.write_text(json.dumps({"files": {str(file): known}}))
    assert file_digests(str(file), "text", root, [file]).contents == {str(file): "recorded"}
    os.utime(file)
    assert file_digests(str(file), "text", root, [file]).contents != {str(file): "recorded"}
    record.write_text("damaged")
    assert file_digests(str(file), "text", root, [file]).contents != {str(file): "recorded"}


def test_a_file_that_changes_while_it_is_prepared_is_refused(tmp_path):
    file = tmp_path / "texts/a.jsonl"
    fill(file, "word")
    builder = TextFiles(str(file), "text", data_dir=str(tmp_path / "data"), file_format="array_record")
    with file.open("a") as opened:
        opened.write('{"text": "more"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: changed while it was being prepared"):
        builder.download_and_prepare()
    assert words(open_text(str(file), "train", tmp_path / "data")) >= {b"more"}


def test_tokens_of_files_that_have_changed_are_refused(tmp_path):
    file, made = tmp_path / "texts/a.jsonl", tmp_path / "tokens"
    fill(file, "AAAA")
    config = DataConfig(name=str(file), data_dir=str(tmp_path / "data"))
    write(config, ByteTokenizer(), made, 1, print)
    tokens = DataConfig(name=str(file), data_dir=str(tmp_path / "data"), tokenized=str(made))
    assert len(open_tokens(tokens, ByteTokenizer(), "train"))
    fill(file, "BBBB")
    with pytest.raises(DataError, match=r"^config\.data\.tokenized: .*: its files have changed since"):
        open_tokens(tokens, ByteTokenizer(), "train")
    file.unlink()  # as on a machine that has the tokens alone
    assert len(open_tokens(tokens, ByteTokenizer(), "train"))


def test_names_that_are_no_utf8_are_files_too(tmp_path):
    (tmp_path / "texts").mkdir()
    path = os.path.join(os.fsencode(tmp_path), b"texts", b"caf\xe9.jsonl")
    with open(path, "w") as file:
        file.write('{"text": "a"}\n{"text": "b"}\n')
    files = text_files(str(tmp_path / "texts"))
    assert len(file_digests(str(tmp_path), "text", tmp_path / "data", files).digest) == 16
    source = open_text(str(tmp_path / "texts"), "train", tmp_path / "data")
    assert [source[i]["text"] for i in range(len(source))] == [b"b"]
