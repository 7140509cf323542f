"""A TFDS builder of text in files of one's own: JSON lines, Parquet or plain text.

Importing this module imports TFDS.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import tensorflow_datasets as tfds

from ddiloco.data.builder import LocalBuilder, one_in
from ddiloco.data.errors import DataError

VALIDATION_ONE_IN = 100
PIECE = 1 << 16  # bytes of plain text after which a document ends with the line

_JSON = (".jsonl", ".ndjson", ".json")
_END = 4096  # bytes at either end of a file that tell it from another of its name and size


def text_files(pattern: str) -> list[pathlib.Path]:
    """The files that a path names, sorted: one, those matched by a glob, or all visible ones under a folder.

    Raises:
      DataError: there are none.
    """
    path = os.path.expanduser(pattern)
    found = glob.iglob(f"{glob.escape(path)}/**" if os.path.isdir(path) else path, recursive=True)
    files = sorted(pathlib.Path(name) for name in found if os.path.isfile(name))
    if not files:
        raise DataError(f"config.data.name: {pattern}: there is no such file")
    return files


def documents(files: Iterable[pathlib.Path], feature: str) -> Iterator[str]:
    """The texts in these files, in order, without those that are missing or nothing but white space.

    Each line of .jsonl, .ndjson and .json, an object, and each row of .parquet has a document in `feature`.
    All else is plain text, cut at the end of a line into documents of about 64 KiB. All but .parquet may
    be compressed (.gz).

    Raises:
      DataError: a file cannot be read, is not UTF-8, or has no such feature.
    """
    for file in files:
        try:
            for text in _texts(file, feature):
                if text.strip():
                    yield text
        except (OSError, EOFError, zlib.error, ValueError) as error:
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"config.data.name: {file}: cannot be read: {told}") from None


class TextFiles(LocalBuilder):
    """The documents of some files. Splits: `validation`, the first and about one in 100, and `train`.

    The config's name is made of the files' names, sizes and ends, so that other files are another data set.
    """

    SPLITS = ("train", "validation")

    def __init__(self, pattern: str, feature: str, **options: Any) -> None:
        self._pattern, self._files, self._feature = pattern, text_files(pattern), feature
        digest = hashlib.blake2b(feature.encode(), digest_size=8)
        for file in self._files:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(_ends(file))
        self._config = tfds.core.BuilderConfig(name=digest.hexdigest())
        super().__init__(config=self._config, **options)

    def get_builder_config(self, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """The only one: TFDS warns of configs that a class does not know."""
        del name, version
        return self._config

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({self._feature: tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        first, found = None, False
        for number, text in enumerate(documents(self._files, self._feature)):
            first = text if first is None else first
            held_out = text == first or one_in(VALIDATION_ONE_IN, text)  # as every copy of it is
            if held_out == (split == "validation"):
                found = True
                yield str(number), {self._feature: text}
        if not found:
            raise DataError(f"config.data.name: {self._pattern}: has no two documents that differ")


def _ends(file: pathlib.Path) -> bytes:
    with file.open("rb") as opened:
        first = opened.read(_END)
        opened.seek(max(0, file.stat().st_size - _END))
        return first + opened.read(_END)


def _texts(file: pathlib.Path, feature: str) -> Iterator[str]:
    compressed = file.suffix == ".gz"
    kind = (file.with_suffix("") if compressed else file).suffix
    if kind == ".parquet":
        yield from _of_parquet(file, feature)
        return
    with gzip.open(file, "rb") if compressed else file.open("rb") as lines:
        yield from _of_json(lines, feature) if kind in _JSON else _of_plain(lines)


def _of_parquet(file: pathlib.Path, feature: str) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        if feature not in names:
            raise ValueError(f"has no {feature!r}, but {', '.join(names)} (data.text_feature)")
        for batch in table.iter_batches(columns=[feature]):
            yield from map(_text, batch.column(0).to_pylist())


def _of_json(lines: Iterable[bytes], feature: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        value = json.loads(line)
        if not isinstance(value, dict) or feature not in value:
            raise ValueError(f"line {number} is no object that has {feature!r} (data.text_feature)")
        yield _text(value[feature])


def _of_plain(lines: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    while piece := b"".join(lines.readlines(PIECE)):
        yield piece.decode()


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"has a {type(value).__name__} where text is wanted")
    return (value or "").encode(errors="replace").decode()  # JSON may have halves of characters
