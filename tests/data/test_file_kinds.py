"""What a file is, is read from its content: rows, plain text, or a kind that is refused by name."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import safetensors.numpy

from ddiloco.data.errors import DataError
from ddiloco.data.file_kinds import HEAD
from ddiloco.data.text_files import documents

TEXTS = [f"document {n}, naïve 学习" for n in range(20)]
ROWS = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()
TABLE = pyarrow.table({"text": TEXTS})
BOM = b"\xef\xbb\xbf"


def packed(codec, content=ROWS):
    return pyarrow.compress(content, codec=codec, asbytes=True)


def told_only(value):
    """Of a parametrized test's id: not the content, of which some has the time in it."""
    return value if isinstance(value, str) else ""


def written(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def arrow(make):
    def write(file):
        with make(file, TABLE.schema) as writer:
            writer.write_table(TABLE)

    return written(write)


def tar(file):
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(ROWS)
        archive.addfile(member, io.BytesIO(ROWS))


def read(folder, name, content, feature="text"):
    (folder / name).write_bytes(content)
    return list(documents([folder / name], feature))


PARQUET = written(lambda file: pyarrow.parquet.write_table(TABLE, file))
ZIP = written(lambda file: zipfile.ZipFile(file, "w").close())
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a zstd frame of no data, as pzstd writes
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"


NAMES = ("a.jsonl", "a.JSONL", "part-00000", "a.jsonl.1", "a.jsonl-00000-of-2", "a.txt", "a.csv")
NAMES += ("a.parquet", "a.gz")


@pytest.mark.parametrize(
    ("name", "before"),
    [*((name, b"") for name in NAMES), ("a.txt", BOM), ("a", b"\n \n"), ("a.gz", BOM + b"\r\n")],
)
def test_json_lines_are_rows_by_any_name(name, before, tmp_path):
    assert read(tmp_path, name, before + ROWS) == TEXTS


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(ROWS), id="gzip"),
        pytest.param(gzip.compress(BOM + ROWS), id="BOM in gzip"),
        pytest.param(bz2.compress(ROWS), id="bz2"),
        pytest.param(lzma.compress(ROWS), id="xz"),
        pytest.param(lzma.compress(ROWS, lzma.FORMAT_ALONE), id="lzma"),
        pytest.param(packed("zstd"), id="zstd"),
        pytest.param(SKIPPED + packed("zstd"), id="pzstd"),
        pytest.param(packed("lz4"), id="lz4"),
        pytest.param(PARQUET, id="Parquet"),
    ],
)
def test_compressions_and_parquet_are_known_by_their_magic(content, tmp_path):
    assert read(tmp_path, "a.zst", content) == TEXTS


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, lambda data: packed("zstd", data)]
)
def test_all_members_of_a_compressed_file_are_read(pack, tmp_path):
    half = ROWS.index(b"\n", len(ROWS) // 2) + 1
    assert read(tmp_path, "a", pack(ROWS[:half]) + pack(ROWS[half:])) == TEXTS


def test_rows_longer_than_what_is_looked_at_are_rows(tmp_path):
    texts = ["x" * (HEAD + 10) + str(n) for n in range(2)]
    rows = "".join(json.dumps({"id": 0, "text": text}) + "\n" for text in texts)
    assert read(tmp_path, "a", rows.encode()) == texts


@pytest.mark.parametrize(
    "text",
    [
        "Well, I said, it is what it is.\nYes, he said, and no.\n",
        "Roses, red\nViolets, blue\n",
        "# Title\n\n```json\n" + '{"text": "a"}\n' * 5 + "```\n" + "more prose\n" * 6,
        "[1] A. Uthor, Title.\n[2] B. Uthor, Other.\n",
        "| text | label |\n|------|-------|\n| a | b |\n",
        "{\n  int a, b;\n}\n",
        "{}\nfoo\n",
        "{{ cookiecutter.name }}\n",
        "rows = [\n" + '    {"text": "a", "id": 1},\n' * 8 + "]\n",
        "package main\n\nfunc a() {\n\tb()\n}\n",
        "BM, MZ, ORC and RIFF begin files.\n",
        "version https is not a pointer\n",
        "<html>\n<p>a page that is meant\n",
    ],
)
def test_prose_and_source_code_stay_plain_text(text, tmp_path):
    assert read(tmp_path, "a", text.encode()) == [text]


def test_byte_order_marks_are_dropped_everywhere(tmp_path):
    assert read(tmp_path, "a.txt", BOM + b"one\n" + BOM + b"two\n") == ["one\ntwo\n"]
    assert read(tmp_path, "a.jsonl", BOM + b'{"text": "\\ufeffone"}\n' + BOM + b'{"text": "two"}\n') == [
        "one",
        "two",
    ]
    table = pyarrow.table({"text": ["\ufeffone"]})
    assert read(tmp_path, "a", written(lambda file: pyarrow.parquet.write_table(table, file))) == ["one"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (POINTER, "is a Git LFS pointer; fetch the file that it stands for: git lfs pull"),
        (
            gzip.compress(b"id,text\n1,a\n"),
            "is a table (CSV), of which rows are not read; convert it to Parquet",
        ),
        (b"id,text\n1,a\n2,b\n", "is a table (CSV)"),
        (BOM + b"id,text\r\n1,a\r\n", "is a table (CSV)"),
        (b'"id","text"\n"1","a, b\nc"\n', "is a table (CSV)"),
        (b"name;age\nann;3\nbob;4\n", "is a table (CSV)"),
        (b"id\ttext\n1\ta\n", "is a table (TSV)"),
        (
            b'[{"text": "a"},\n{"text": "b"}]\n',
            "is one JSON array, but must have an object a line; convert it: jq",
        ),
        (b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', "has JSON objects over several lines"),
        (
            json.dumps({"data": [{"text": "a" * 999}] * 2000}, indent=1).encode(),
            "has JSON objects over several",
        ),
        ("a\nb".encode("utf-16"), "is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"),
        ("a\nb".encode("utf-32"), "is UTF-32 text"),
        (ZIP, "is a zip archive"),
        (written(tar), "is a tar archive"),
        (gzip.compress(gzip.compress(ROWS)), "is gzip within gzip"),
        (gzip.compress(PARQUET), "is Parquet within gzip"),
        (b"%PDF-1.7\n", "is a PDF document"),
        (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "is a WARC archive"),
        (arrow(pyarrow.ipc.new_file), "is an Arrow or Feather file"),
        (written(lambda file: np.save(file, np.zeros(3))), "is a NumPy array"),
        (safetensors.numpy.save({"a": np.zeros(3)}), "is a safetensors file"),
        (pickle.dumps(TEXTS), "is a Python pickle"),
        (b"\x89PNG\r\n\x1a\n", "is an image"),
        (b"SQLite format 3\0", "is a SQLite database"),
        (b"\x01\x00\x02binary", "is binary, of no kind that is known here: byte 2 is NUL"),
    ],
    ids=told_only,
)
def test_other_kinds_are_refused_by_name(content, told, tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, "a.jsonl", content)
    assert str(error.value).startswith(f"config.data.name: {tmp_path / 'a.jsonl'}: {told}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"<!DOCTYPE html>\n<html>", ": is a web page or XML"),
        ("a.gz", b"<?xml version='1.0'?><Error>", ": is a web page or XML"),
        ("a.parquet", b"<html>", ": is a web page or XML"),
        ("a.parquet", b"no table", ": is named as Parquet, but is text"),
        ("a.parquet", b"", ": is named as Parquet, but is empty"),
        ("A.CSV", b"one column\n", ": is a table (CSV)"),
        ("a.tsv.gz", gzip.compress(b"prose"), ": is a table (TSV)"),
        ("a.json.1", b"no rows\n", ", line 1: is no JSON"),
        ("a\nb.csv", b"a", "': is a table (CSV)"),
    ],
    ids=told_only,
)
def test_a_name_that_promises_what_is_not_there_is_refused(name, content, told, tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, name, content)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        (b'{"text": "cut off', "is no JSON: Unterminated string starting at column 10"),
        (b'{"text": "a"} b', "is no JSON: Extra data at column 15"),
        (b'{"body": "a", "id": 1}', "has no 'text', but body, id (data.text_feature names the field)"),
        (b"{}", "has no 'text', and no other field"),
        (b"[1]", "is an array, but must be an object that has 'text'"),
        (b'{"text": {"a": 1}}', "'text' is an object, but must be a string"),
        (b'{"text": true}', "'text' is true or false, but must be a string"),
        (b'{"text": "caf\xe9"}', "byte 14 of the line (0xe9) is not UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "is no JSON that is read: "),
    ],
    ids=told_only,
)
def test_a_bad_row_is_told_with_its_line(row, told, pack, tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, "a", pack(b"\n" + ROWS + row + b"\n" + ROWS))
    assert str(error.value).startswith(f"config.data.name: {tmp_path / 'a'}, line 22: {told}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b'cut off"}\n' + ROWS, b'{"body": "a"}\n' * 3, b'{"body": "a"}'])
def test_rows_are_known_where_the_first_is_cut_or_none_has_the_text(content, tmp_path):
    with pytest.raises(DataError, match=r"/part, line 1: (is no JSON|has no 'text', but body)"):
        read(tmp_path, "part", content)


def test_a_byte_that_is_not_utf8_is_told_with_its_place_in_plain_text(tmp_path):
    with pytest.raises(DataError, match=r"/a, line 20002: byte 4 of the line \(0xe9\) is not UTF-8"):
        read(tmp_path, "a", b"a line\n" * 20_001 + b"caf\xe9\n")


def test_a_row_of_a_table_is_told_by_its_number(tmp_path):
    for values, told in (([["a"]], "'text' is an array"), ([b"a"], "'text' is bytes")):
        table = pyarrow.table({"text": [None, *values]})
        content = written(lambda file, table=table: pyarrow.parquet.write_table(table, file))
        with pytest.raises(DataError, match=rf"/a, row 2: {told}, but must be a string"):
            read(tmp_path, "a", content)
    invalid = pyarrow.array([b"a", b"caf\xe9"]).cast(pyarrow.string(), safe=False)
    content = written(lambda file: pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), file))
    with pytest.raises(DataError, match=r"/a, row 2: byte 4 of the text \(0xe9\) is not UTF-8"):
        read(tmp_path, "a", content)


def test_kinds_are_looked_at_before_anything_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    (tmp_path / "b.jsonl").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"b.jsonl: is a Git LFS pointer"):
        next(documents([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], "text"))
