"""Small values in a file of JSON, with checksums; a crash leaves the old values or the new ones.

A line has values of its own, which replace those of the same names in earlier lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.storage import array_file

_CHECK = "sha256"  # of the rest of the line


def save(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes the values over an older file; returns when they are durable. Raises OSError."""
    array_file.replace(path, [_line(values)])


def append(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Adds values to a file, or replaces some in it; returns when they are durable.

    Raises OSError. Then nothing more may be appended, since half a line may be there.
    """
    with path.open("ab") as file:
        file.write(_line(values))
        file.flush()
        os.fsync(file.fileno())


def load(path: pathlib.Path) -> dict[str, Any]:
    """What `save` and `append` wrote, without an unfinished last line.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is damaged.
    """
    *lines, last = path.read_bytes().split(b"\n")
    if last and (b"}" in last or not lines):  # else it is unfinished
        lines.append(last)
    if not lines:
        raise ValueError("is damaged: it is empty")
    values: dict[str, Any] = {}
    for line in lines:
        try:
            found = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}") from None
        if found.pop(_CHECK, None) != _sha256(found):
            raise ValueError("is damaged: its checksum does not fit")
        values.update(found)
    return values


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps({**values, _CHECK: _sha256(values)}).encode() + b"\n"


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
