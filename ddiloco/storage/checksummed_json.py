"""Small values in a file of JSON, with a checksum; a crash leaves the old file or the new one."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.storage import array_file

_CHECK = "sha256"  # of the rest of the file


def save(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes the values over an older file; returns when they are durable. Raises OSError."""
    array_file.replace(path, [json.dumps({**values, _CHECK: _sha256(values)}).encode()])


def load(path: pathlib.Path) -> dict[str, Any]:
    """What `save` wrote.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is damaged.
    """
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"is damaged: {type(error).__name__}") from None
    if found.pop(_CHECK, None) != _sha256(found):
        raise ValueError("is damaged: its checksum does not fit")
    return found


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
