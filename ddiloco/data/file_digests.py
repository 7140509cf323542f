"""Digests of the files of a data set, and which of them differ from those that were prepared before."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.data import preparation
from ddiloco.data.file_paths import refusal

FOLDER = "text_files"  # of the prepared data sets, under the root of all

_RECORDS = ".files"
_WAIT_SECONDS = 24 * 3600.0
_SETTLED_NS = 2_000_000_000  # a file that changed later than this before it was read may change unseen
_SHOWN = 3  # files that a line names

# Size in bytes, and the times of the last change of content and of status, in ns.
_Status = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class FileDigests:
    """The files of a pattern with digests of their content, and a record of them for the next time.

    A file is read anew if its size, its modification time or its status' time is another than in the record.
    """

    pattern: str
    files: Sequence[pathlib.Path]
    digest: str
    """Of the feature, and the names and contents of all files: the same on every machine."""
    contents: Mapping[str, str]
    """The digest of each file, by its absolute path."""
    statuses: Mapping[str, _Status]
    prepared: Mapping[str, str]
    """`contents`, when this pattern was last prepared here; empty: it never was."""
    record: pathlib.Path

    def changes(self) -> str | None:
        """Files that are new, changed or gone since the last preparation; None if there was none."""
        before, now = self.prepared, self.contents
        if not before or before == now:
            return None
        base = os.path.commonpath([os.path.dirname(path) for path in (*before, *now)])
        kinds = {
            "changed": [path for path in now if path in before and before[path] != now[path]],
            "new": [path for path in now if path not in before],
            "gone": [path for path in before if path not in now],
        }
        return "; ".join(f"{kind}: {_names(paths, base)}" for kind, paths in kinds.items() if paths)

    def check_unchanged(self) -> None:
        """Raises DataError if a file is not any more what it was when its digest was made."""
        for file in self.files:
            try:
                same = _status(file) == self.statuses[os.path.abspath(file)]
            except OSError:
                same = False
            if not same:
                raise refusal(file, "changed while it was being prepared; start again once it is complete")

    def remember_prepared(self) -> None:
        """Records that these contents are prepared, as far as the disk lets it."""
        if self.prepared != self.contents:
            saved = _load(self.record)
            _save(self.record, {**saved, "prepared": dict(self.contents)})


def file_digests(
    pattern: str, feature: str, root: str | os.PathLike[str], files: Sequence[pathlib.Path]
) -> FileDigests:
    """Digests of the files of a pattern, each read if it may differ from what is recorded under `root`.

    One process of a machine reads them and others wait.

    Raises:
      DataError: one cannot be read.
    """
    key = hashlib.blake2b(digest_size=8)
    for part in (os.path.abspath(os.path.expanduser(pattern)), feature):
        key.update(os.fsencode(part) + b"\0")
    record = pathlib.Path(root, FOLDER, _RECORDS, f"{key.hexdigest()}.json")
    try:
        found = {os.path.abspath(file): _status(file) for file in files}
        saved = _load(record)
        contents = _unchanged(found, saved)
        if len(contents) < len(found):
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # a root that cannot be written to
                    stack.enter_context(preparation.sole_preparer(record.parent, _WAIT_SECONDS))
                saved = _load(record)
                contents = _read(found, _unchanged(found, saved), record, saved)
    except OSError as error:
        raise refusal(error.filename or pattern, f"cannot be read: {error.strerror or error}") from None
    digest = hashlib.blake2b(feature.encode(), digest_size=8)
    for file in files:
        digest.update(b"\0" + os.fsencode(file.name) + b"\0" + contents[os.path.abspath(file)].encode())
    prepared = saved.get("prepared", {})
    return FileDigests(pattern, files, digest.hexdigest(), contents, found, prepared, record)


def _status(file: str | pathlib.Path) -> _Status:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unchanged(found: Mapping[str, _Status], saved: Mapping[str, Any]) -> dict[str, str]:
    """The recorded digests of the files that are as they were."""
    known = saved.get("files", {})
    return {
        path: known[path][-1] for path, status in found.items() if known.get(path, [])[:-1] == list(status)
    }


def _read(
    found: Mapping[str, _Status], contents: dict[str, str], record: pathlib.Path, saved: Mapping[str, Any]
) -> dict[str, str]:
    """Reads the files that `contents` lacks, and records all but those that changed a moment ago."""
    import tqdm

    files = {path: [*status, contents[path]] for path, status in found.items() if path in contents}
    waiting = [path for path in found if path not in contents]
    total = sum(found[path][0] for path in waiting)
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="reading files", delay=2, leave=False) as bar:
        for path in waiting:
            settled = time.time_ns() - _SETTLED_NS
            with open(path, "rb") as opened:
                contents[path] = hashlib.file_digest(opened, _hash).hexdigest()
            if max(found[path][1:]) < settled:
                files[path] = [*found[path], contents[path]]
            bar.update(found[path][0])
    _save(record, {**saved, "files": files})
    return contents


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _load(record: pathlib.Path) -> dict[str, Any]:
    try:
        saved = json.loads(record.read_text())
        return saved if isinstance(saved, dict) else {}
    except (OSError, ValueError):
        return {}


def _save(record: pathlib.Path, values: Mapping[str, Any]) -> None:
    partial = record.with_suffix(f".{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values))
        partial.replace(record)


def _names(paths: Sequence[str], base: str) -> str:
    names = [os.path.relpath(path, base) for path in sorted(paths)]
    names = [name if name.isprintable() else repr(name) for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
