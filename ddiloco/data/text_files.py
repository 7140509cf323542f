"""A TFDS builder of text in files of one's own: JSON lines, Parquet or plain text, known by their content.

Importing this module imports TFDS.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import tensorflow_datasets as tfds

from ddiloco.data.errors import DataError
from ddiloco.data.source_files import file_digests, refusal, text_files
from ddiloco.data.tfds_builder import LocalBuilder, one_in

VALIDATION_ONE_IN = 100
PIECE = 1 << 16  # bytes of plain text after which a document ends with the line
HEAD = 1 << 20  # bytes from which the kind of a file is detected
_FIELDS_SHOWN = 20
_NUL_WITHIN = 8000  # bytes in which a NUL marks a binary file, as for Git
_LINES = 16  # the first ones, by which rows are distinguished from plain text

Content = Literal["rows", "plain", "parquet"]


class FileKind(NamedTuple):
    """A reader of one kind of file."""

    content: Content
    """rows: a JSON object a line."""
    compression: str | None


_COMPRESSIONS = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one to skip
    "xz": rb"\xfd7zXZ\0|\x5d\0\0[\0-\xff]{2}",  # also .lzma
    "bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "lz4": rb"\x04\x22\x4d\x18",
}

# What is refused: how it begins, what it is, and what to do. Other binary files are refused for a NUL.
_TO_ROWS = "its text must be put into JSON lines or Parquet, or into plain text"
_FETCH = "fetch the file that it stands for"
_REFUSED = (
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)|7z\xbc\xaf|Rar!\x1a|[\s\S]{257}ustar", "an archive", "unpack it"),
    (rb"%PDF-", "a PDF document", _TO_ROWS),
    (rb"WARC/[01]\.", "a WARC archive of web pages", _TO_ROWS),
    (rb"version https?://\S+\s+(ext-\S+ \S+\s+)*oid sha256:", "a Git LFS pointer", f"{_FETCH}: git lfs pull"),
    (rb"# xet version ", "a Xet pointer", _FETCH),
    (rb"(\.\./)*(\.git)?/annex/objects/\S+\s*\Z", "a git-annex pointer", f"{_FETCH}: git annex get"),
)
_PAGE = re.compile(r"<(!doctype html|html|\?xml)", re.IGNORECASE)

# Of names: a shard's or a rotation's number and the compression, then the suffix that promises something.
_AFTER_SUFFIX = re.compile(r"([-._](\d+|of|part\d*|gz|gzip|zst|zstd|xz|lzma|bz2|lz4))+$")
_COMPRESSED_NAME = re.compile(r"\.(gz|gzip|zst|zstd|xz|lzma|bz2|lz4|zip|tar|tgz|7z|rar)$")
_ROWS_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".json")
_TABLE_SUFFIXES = {".csv": "CSV", ".tsv": "TSV", ".tab": "TSV"}


def kind_of(file: pathlib.Path, feature: str) -> FileKind:
    """What a file is, given which field of its rows would have the text.

    Raises:
      DataError: it is of a kind that is not read, or damaged at its beginning.
      OSError, EOFError, zlib.error, lzma.LZMAError: it cannot be read.
    """
    with file.open("rb") as opened:
        head = opened.read(HEAD)
    compression = _compression(head)
    if compression:
        with opened_bytes(file, compression) as lines:
            head = lines.read(HEAD)
        if within := _compression(head):
            raise refusal(file, f"is {within} within {compression}; decompress it once")
    if head.startswith(b"PAR1"):
        if compression:
            raise refusal(file, f"is Parquet within {compression}; decompress it")
        return FileKind("parquet", None)
    _refuse_others(file, head)
    return FileKind(_content(file, head, feature, compression is not None), compression)


def opened_bytes(file: pathlib.Path, compression: str | None) -> BinaryIO:
    """The file, decompressed.

    Raises:
      OSError: it cannot be opened.
      DataError: this machine's pyarrow lacks the compression.
    """
    if compression is None:
        return file.open("rb")
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if compression == "bz2":
        return cast(BinaryIO, bz2.open(file, "rb"))
    if compression == "xz":
        return cast(BinaryIO, lzma.open(file, "rb"))
    import pyarrow

    if not pyarrow.Codec.is_available(compression):
        raise refusal(file, f"is {compression}, which this pyarrow does not read; install pyarrow from PyPI")
    return io.BufferedReader(pyarrow.CompressedInputStream(str(file), compression))


def json_kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _compression(head: bytes) -> str | None:
    return next((name for name, magic in _COMPRESSIONS.items() if re.match(magic, head)), None)


def _refuse_others(file: pathlib.Path, head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        name = "UTF-32" if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) else "UTF-16"
        raise refusal(file, f"is {name} text; convert it: iconv -f {name} -t UTF-8")
    nul = head.find(b"\0", 0, _NUL_WITHIN)
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    for magic, name, advice in _REFUSED:
        if re.match(magic, text):
            raise refusal(file, f"is {name}; {advice}")
    for name, others in (("UTF-16LE", head[1:_NUL_WITHIN:2]), ("UTF-16BE", head[:_NUL_WITHIN:2])):
        if nul in (0, 1) and 4 * others.count(0) > 3 * len(others):
            raise refusal(file, f"is {name} text, or binary; convert it: iconv -f {name} -t UTF-8")
    if nul >= 0:
        kinds = "JSON lines, Parquet and plain text are read"
        raise refusal(
            file, f"is binary: byte {nul + 1} is NUL; {kinds}, also with gzip, zstd, xz, bz2 or lz4"
        )


def _content(file: pathlib.Path, head: bytes, feature: str, compressed: bool) -> Content:
    """Whether a text's lines are rows; raises DataError where it is neither these nor plain text."""
    whole = len(head) < HEAD
    text = head.decode(errors="ignore").replace("\ufeff", "").lstrip()
    name = file.name.lower()
    suffix = pathlib.PurePath(_AFTER_SUFFIX.sub("", name)).suffix
    promised = suffix in (*_ROWS_SUFFIXES, ".parquet") or (_COMPRESSED_NAME.search(name) and not compressed)
    if promised and _PAGE.match(text):
        raise refusal(file, "is a web page or XML, such as servers send in place of a file; fetch it again")
    if one := _one_json_value(text, whole):
        jq = "jq -c '.[]'" if one == "array" else "jq -c ."
        problem = "is one JSON array" if one == "array" else "has JSON objects over several lines"
        raise refusal(file, f"{problem}, but must have an object a line; convert it: {jq} FILE > FILE.jsonl")
    if _has_rows(text, feature, whole):
        return "rows"
    if suffix == ".parquet":
        raise refusal(file, f"is named as Parquet, but is {'text' if text else 'empty'}")
    if table := _TABLE_SUFFIXES.get(suffix):
        problem = f"is a table ({table}), of which rows are not read"
        raise refusal(file, f"{problem}; convert it to Parquet or JSON lines, with the text in {feature!r}")
    return "rows" if suffix in _ROWS_SUFFIXES else "plain"  # reading reports what line 1 has instead of a row


def _has_rows(text: str, feature: str, whole: bool) -> bool:
    """Whether the first line is a row, or half of the first lines are, or most are objects without text."""
    lines = text.split("\n", _LINES)
    lines = lines if whole and len(lines) <= _LINES else lines[:-1]
    lines = [line for line in lines if line.strip()]
    if not lines:  # the first line is longer than the head, or there is none
        return text.startswith("{") and _is_cut(text, _json_error(text))
    objects = [found for line in lines if (found := _object(line))]
    having = sum(feature in found for found in objects)
    first = _object(lines[0], whole=False) or {}
    return feature in first or 2 * having >= len(lines) or 2 * len(objects) > len(lines)


def _object(line: str, whole: bool = True) -> dict[str, Any] | None:
    """The JSON object that a line is, or begins with if it need not be the whole line."""
    line = line.strip()
    if not line.startswith("{"):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return None
    return None if whole and end < len(line) else cast(dict[str, Any], value)


def _json_error(text: str) -> json.JSONDecodeError | None:
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return None


def _is_cut(text: str, error: json.JSONDecodeError | None) -> bool:
    """Whether the text is the beginning of a JSON value, by the error of reading it."""
    if error is None:
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - len("\\u0000")


def _one_json_value(text: str, whole: bool) -> Literal["array", "object"] | None:
    """The kind of JSON that is not an object a line: an array, or objects over several lines; else None."""
    if not text.startswith(("[", "{")):
        return None
    kind: Literal["array", "object"] = "array" if text[0] == "[" else "object"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        cut = not whole and _is_cut(text, error)
        return kind if cut and (kind == "array" or "\n" in text) else None
    except (ValueError, RecursionError):
        return None
    rest = text[end:].lstrip()
    if kind == "array":
        return None if rest else kind
    return kind if "\n" in text[:end] and rest[:1] in ("", "{", ",") else None


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

    def get_builder_config(self, name: str, version: Any = None) -> tfds.core.BuilderConfig:
        """The only one: TFDS warns of configs that a class does not know."""
        del name, version
        return self._config

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({self._feature: tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

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
