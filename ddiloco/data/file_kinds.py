"""The kind of a file, by its first bytes and lines; its name counts only if it contradicts them."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import pathlib
import re
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from ddiloco.data.file_paths import refusal

HEAD = 1 << 20  # bytes that are looked at
_NUL_WITHIN = 8000  # bytes in which a NUL marks a binary file, as for Git
_LINES = 16  # the first ones, which tell rows from plain text
_TABLE_LINES = 200  # which tell a table from plain text

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

# What is refused: how it begins, and what it is.
_UNPACK = "unpack it and name the files that are in it"
_DECOMPRESS = "decompress it, or compress it with gzip, zstd, xz or bz2"
_TO_ROWS = "its text must be put into JSON lines or Parquet, or into plain text"
_CONVERT = "convert it to Parquet or JSON lines"
_BINARY = (
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive (as .docx, .xlsx, .epub, .npz and .pt are)", _UNPACK),
    (rb"[\s\S]{257}ustar", "a tar archive", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (rb"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (rb"\x1f[\x9d\xa0]|LZIP|\xff\x06\0\0sNaPpY|\x02\x21\x4c\x18|\x89LZO", "compressed", _DECOMPRESS),
    (rb"PARE", "encrypted Parquet", "decrypt it"),
    (rb"ARROW1|\xff\xff\xff\xff[\0-\xff]{3}\0|FEA1", "an Arrow or Feather file", _CONVERT),
    (rb"ORC", "an ORC file", _CONVERT),
    (rb"Obj\x01", "an Avro file", _CONVERT),
    (rb"\x93NUMPY", "a NumPy array", _CONVERT),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (rb"SQLite format 3\0", "a SQLite database", _CONVERT),
    (rb"\x80[\x02-\x05]", "a Python pickle", _CONVERT),
    (rb"[\s\S]{4}\0{4}\{", "a safetensors file", "name files of text"),
    (rb"GGUF|GGML|lmgg", "a GGUF model", "name files of text"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0|MM\0\*|BM", "an image", "name files of text"),
    (rb"RIFF|ID3|OggS|fLaC|[\0-\xff]{4}ftyp|\x1aE\xdf\xa3|\xff\xfb", "sound or video", "name files of text"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a Microsoft Office document", _TO_ROWS),
    (rb"\x7fELF|MZ|\xfe\xed\xfa|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe|\0asm", "a program", "name files of text"),
)
_FETCH = "fetch the file that it stands for"
_TEXTUAL = (
    (rb"%PDF-", "a PDF document", _TO_ROWS),
    (rb"\{\\rtf", "an RTF document", _TO_ROWS),
    (rb"%!PS", "a PostScript document", _TO_ROWS),
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
_COLUMN = re.compile(r"[^\W\d][\w.\-/]*( [\w.\-/]+){0,3}")


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
    _refuse_binary(file, head)
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


def _refuse_binary(file: pathlib.Path, head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        name = "UTF-32" if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) else "UTF-16"
        raise refusal(file, f"is {name} text; convert it: iconv -f {name} -t UTF-8")
    nul = head.find(b"\0", 0, _NUL_WITHIN)
    for magic, name, advice in _BINARY:
        found = re.match(magic, head)
        if found and (nul >= 0 or not _is_printable(found.group())):  # else it is a word that begins a text
            raise refusal(file, f"is {name}; {advice}")
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    for magic, name, advice in _TEXTUAL:
        if re.match(magic, text):
            raise refusal(file, f"is {name}; {advice}")
    for name, others in (("UTF-16LE", head[1:_NUL_WITHIN:2]), ("UTF-16BE", head[:_NUL_WITHIN:2])):
        if nul in (0, 1) and 4 * others.count(0) > 3 * len(others):
            raise refusal(file, f"is {name} text, or binary; convert it: iconv -f {name} -t UTF-8")
    if nul >= 0:
        raise refusal(file, f"is binary, of no kind that is known here: byte {nul + 1} is NUL")


def _is_printable(magic: bytes) -> bool:
    return magic.isascii() and magic.decode().isprintable()


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
    if table := _TABLE_SUFFIXES.get(suffix) or _table(text, feature, whole):
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


def _table(text: str, feature: str, whole: bool) -> str | None:
    """CSV or TSV, if the first line names columns and all lines that are looked at have as many."""
    lines = text.split("\n", _TABLE_LINES)
    lines = lines if whole and len(lines) <= _TABLE_LINES else lines[:-1]
    for name, delimiter in (("TSV", "\t"), ("CSV", ","), ("CSV", ";"), ("CSV", "|")):
        rows: list[list[str]] = []
        try:
            for row in csv.reader(lines, delimiter=delimiter, strict=True):
                rows += [row] if row else []
        except csv.Error:  # also a quoted field that goes on beyond these lines
            pass
        first, *others = rows or [[]]
        header = [field.strip() for field in first]
        named = header[1:] if header[:1] == [""] and delimiter != "|" else header  # an index has no name
        if len(header) < 2 or len(set(header)) < len(header) or not all(map(_COLUMN.fullmatch, named)):
            continue
        same = all(len(row) == len(header) for row in others)
        if same and len(others) >= (1 if feature in header else 2) and (feature in header or header == first):
            return name
    return None
