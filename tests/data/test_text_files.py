"""Text in files of one's own: what is a document, in which split, and what is told of files that are none."""

import gzip
import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.sources import open_images, open_text
from ddiloco.data.text_files import PIECE, documents, text_files
from ddiloco.data.tokenized import open_tokens
from ddiloco.data.tokenizers import ByteTokenizer

TEXTS = [f"text {n}\nof two lines, naïve 学习" for n in range(500)]


def json_lines(texts, feature="text"):
    return "".join(json.dumps({"id": n, feature: text}) + "\n" for n, text in enumerate(texts)).encode()


def parquet(path, texts, feature="text"):
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), feature: texts}), path)


def opened(name, folder, **changes):
    return [open_text(str(name), split, folder / "data", **changes) for split in ("train", "validation")]


def texts_of(source):
    return [source[i]["text"].decode() for i in range(len(source))]


def test_missing_texts_are_left_out_and_halves_of_characters_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n\n{"text": "a\\ud800b"}\n{"text": "c"}\n')
    parquet(tmp_path / "b.parquet", ["a?b", None, "c"])
    for name in ("a.jsonl", "b.parquet"):
        assert [texts_of(part) for part in opened(tmp_path / name, tmp_path)] == [["c"], ["a?b"]]


def test_every_document_is_in_one_split_and_copies_are_in_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([*TEXTS, *TEXTS, "", " \n"]))
    train, held_out = map(texts_of, opened(tmp_path / "a.jsonl", tmp_path))
    assert sorted(train + held_out) == sorted(TEXTS * 2)
    assert not set(train) & set(held_out) and TEXTS[0] in held_out
    assert 2 < len(set(held_out)) < 20
    assert train == [text for text in TEXTS * 2 if text in set(train)]


def test_plain_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    lines = [f"line {n} " + "x" * (n % 70) for n in range(10_000)]
    (tmp_path / "book.txt").write_text("\n".join(lines))
    (tmp_path / "note.md").write_text("short")
    found = list(documents(text_files(str(tmp_path)), "text"))
    assert "".join(found[:-1]) == "\n".join(lines) and found[-1] == "short"
    assert len(found) > 5 and all(part.endswith("\n") for part in found[:-2])
    assert all(PIECE <= len(part) < PIECE + 100 for part in found[:-2])


def test_a_path_is_a_file_a_glob_or_all_visible_files_under_a_folder(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt", ".hidden", "deep/.git/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [str(file) for file in text_files("./b.txt")] == ["b.txt"]
    assert [file.name for file in text_files("~/*.txt")] == ["a.txt", "b.txt"]
    assert [file.name for file in text_files(str(tmp_path))] == ["a.txt", "b.txt", "c.md", "d.txt"]
    assert [file.name for file in text_files("./**/*.txt")] == ["a.txt", "b.txt", "d.txt"]


def test_a_run_reads_its_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    config = DataConfig(name=str(tmp_path / "*.jsonl"), data_dir=str(tmp_path / "data"))
    held_out = open_tokens(config, ByteTokenizer(), "validation")
    np.testing.assert_array_equal(held_out[0], [257, *TEXTS[0].encode(), 258])


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing.txt", None, "missing.txt: there is no such file"),
        ("a.jsonl.gz", gzip.compress(json_lines(TEXTS), mtime=0)[:-20], "a.jsonl.gz: cannot be read: "),
        ("a.parquet", b"PAR1 no table", "a.parquet: cannot be read: ArrowInvalid"),
        ("a.txt", b"\n \n", "a.txt: has no two documents that differ"),
    ],
)
def test_files_that_are_no_text_are_told_in_one_line(name, content, told, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"^config\.data\.name: ") as error:
        opened(tmp_path / name, tmp_path)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_path_that_looks_like_a_name_is_told_as_one(tmp_path, monkeypatch):
    name = "texts/a.txt"
    (tmp_path / "texts").mkdir()
    (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^config\.data\.name: TFDS .*; did you mean \./{name}\?$"):
        opened(name, tmp_path)


def test_progress_bars_are_for_terminals(tmp_path, capfd):
    tfds.enable_progress_bar()
    (tmp_path / "text.jsonl").write_bytes(json_lines(TEXTS))
    opened(tmp_path / "text.jsonl", tmp_path)
    assert capfd.readouterr().err == ""


def test_images_are_not_read_from_files(tmp_path):
    from ddiloco.data.settings import ImagesConfig

    config = ImagesConfig(name=str(tmp_path), data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"^config\.data\.name: is .*, but files are read for text alone"):
        open_images(config, "train", 3)


def test_a_preparation_that_fails_leaves_nothing_that_passes_for_a_data_set(tmp_path):
    file = pathlib.Path(tmp_path / "a.jsonl")
    file.write_bytes(json_lines(TEXTS) + b"{\n")
    with pytest.raises(DataError):
        opened(file, tmp_path)
    file.write_bytes(json_lines(TEXTS))
    assert sum(map(len, opened(file, tmp_path))) == len(TEXTS)
