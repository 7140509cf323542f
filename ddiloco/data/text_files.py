"""A TFDS builder of text in files of one's own: JSON lines, Parquet or plain text.

Importing this module imports TFDS.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import pathlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import tensorflow_datasets as tfds

from ddiloco.data.errors import DataError
from ddiloco.data.file_digests import file_digests
from ddiloco.data.file_kinds import FileKind, json_kind, kind_of, opened_bytes
from ddiloco.data.file_paths import refusal, text_files
from ddiloco.data.tfds_builder import LocalBuilder, one_in

__all__ = ["PIECE", "VALIDATION_ONE_IN", "TextFiles", "documents", "text_files"]

VALIDATION_ONE_IN = 100
PIECE = 1 << 16  # bytes of plain text after which a document ends with the line

_FIELDS_SHOWN = 20


def documents(files: Iterable[pathlib.Path], feature: str) -> Iterator[str]:
    """The texts in these files, in order, without those that are missing or nothing but white space.

    Each line of a file of JSON objects, and each row of Parquet, has a document in `feature`. All else is
    plain text, cut at the end of a line into documents of about 64 KiB. `kind_of` tells them apart, by their
    content. All but Parquet may be compressed. Byte order marks are dropped.

    Raises:
      DataError: a file cannot be read, is of a kind that is not, is not UTF-8, or has no such feature. What
        kinds there are is looked at before anything is read.
    """
    files = list(files)
    kinds = []
    for file in files:
        with _one_line_errors(file):
            kinds.append(kind_of(file, feature))
    for file, kind in zip(files, kinds, strict=True):
        with _one_line_errors(file):
            for text in _texts(file, kind, feature):
                text = text.replace("\ufeff", "")
                if text.strip():
                    yield text


class TextFiles(LocalBuilder):
    """The documents of some files. Splits: `validation`, the first and about one in 100, and `train`.

    The config's name is made of the files' names and contents, so that other files are another data set and
    copies of them elsewhere are not.
    """

    SPLITS = ("train", "validation")

    def __init__(self, pattern: str, feature: str, *, data_dir: str, **options: Any) -> None:
        self._pattern, self._feature = pattern, feature
        self._digests = file_digests(pattern, feature, data_dir, text_files(pattern))
        self._config = tfds.core.BuilderConfig(name=self._digests.digest)
        super().__init__(config=self._config, data_dir=data_dir, **options)

    def remember_prepared(self) -> None:
        """Records which contents the pattern's files have now that they are prepared."""
        self._digests.remember_prepared()

    def get_builder_config(self, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """The only one: TFDS warns of configs that a class does not know."""
        del name, version
        return self._config

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({self._feature: tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
        if changes := self._digests.changes():
            _print_line(f"config.data.name: {self._pattern} is prepared again; {changes}")
        return super()._split_generators(dl_manager)

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        first, found = None, False
        for number, text in enumerate(documents(self._digests.files, self._feature)):
            first = text if first is None else first
            held_out = text == first or one_in(VALIDATION_ONE_IN, text)  # as every copy of it is
            if held_out == (split == "validation"):
                found = True
                yield str(number), {self._feature: text}
        self._digests.check_unchanged()
        if not found:
            raise DataError(f"config.data.name: {self._pattern}: has no two documents that differ")


def _print_line(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _one_line_errors(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise refusal(file, f"cannot be read: {problem}") from None


def _texts(file: pathlib.Path, kind: FileKind, feature: str) -> Iterator[str]:
    if kind.content == "parquet":
        yield from _of_parquet(file, feature)
        return
    with opened_bytes(file, kind.compression) as lines:
        yield from _of_rows(file, lines, feature) if kind.content == "rows" else _of_plain(file, lines)


def _of_parquet(file: pathlib.Path, feature: str) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        if feature not in names:
            raise refusal(file, f"has {_without(feature, names)}")
        row = 0
        for batch in table.iter_batches(columns=[feature]):
            for scalar in batch.column(0):
                row += 1
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError as error:
                    raise refusal(file, _not_utf8(error, "text"), f"row {row}") from None
                yield _text(file, value, feature, f"row {row}")


def _of_rows(file: pathlib.Path, lines: Iterable[bytes], feature: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        place = f"line {number}"
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
            if not text.strip():
                continue
            value = json.loads(text)
        except UnicodeDecodeError as error:
            raise refusal(file, _not_utf8(error, "line"), place) from None
        except json.JSONDecodeError as error:
            problem = f"is no JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}"
            raise refusal(file, problem, place) from None
        except (ValueError, RecursionError) as error:
            raise refusal(file, f"is no JSON that is read: {error}", place) from None
        if not isinstance(value, dict):
            raise refusal(file, f"is {json_kind(value)}, but must be an object that has {feature!r}", place)
        if feature not in value:
            raise refusal(file, f"has {_without(feature, list(value))}", place)
        yield _text(file, value[feature], feature, place)


def _of_plain(file: pathlib.Path, lines: BinaryIO) -> Iterator[str]:
    before = 0  # lines of earlier pieces
    while piece := b"".join(lines.readlines(PIECE)):
        try:
            yield piece.decode()
        except UnicodeDecodeError as error:
            start = piece.rfind(b"\n", 0, error.start) + 1
            line = before + piece.count(b"\n", 0, error.start) + 1
            problem = _not_utf8(error, "line", error.start - start)
            raise refusal(file, problem, f"line {line}") from None
        before += piece.count(b"\n")


def _without(feature: str, names: list[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:_FIELDS_SHOWN]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    having = f"but {', '.join(shown)}{more}" if names else "and no other field"
    return f"no {feature!r}, {having} (data.text_feature names the field)"


def _not_utf8(error: UnicodeDecodeError, of: str, at: int | None = None) -> str:
    at = error.start if at is None else at
    problem = f"byte {at + 1} of the {of} (0x{error.object[error.start]:02x}) is not UTF-8"
    return f"{problem}; convert the file with iconv if it is text in another encoding"


def _text(file: pathlib.Path, value: Any, feature: str, place: str) -> str:
    if not isinstance(value, str | None):
        raise refusal(file, f"{feature!r} is {json_kind(value)}, but must be a string", place)
    return (value or "").encode(errors="replace").decode()  # JSON may have halves of characters
