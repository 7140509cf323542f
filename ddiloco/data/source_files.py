"""The files that a path names, each real file once; and digests of what is in them."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddiloco.data import preparation
from ddiloco.data.errors import DataError
from ddiloco.telemetry.files import read_json, write_json


def is_path(name: str) -> bool:
    """Whether the name of a data set is a path of files."""
    return name.startswith(("/", "./", "../", "~"))


def text_files(pattern: str) -> list[pathlib.Path]:
    """The files that a path names, sorted: one, those matched by a glob, or all visible ones under a folder.

    A part of the path that exists as it is written is no pattern. A file with several names, by links, is
    one file.

    Raises:
      DataError: there are none, a folder cannot be listed, a link leads nowhere, or they are a whole cache of
        the Hugging Face hub, of which one snapshot is meant.
    """
    path = os.path.expanduser(pattern)
    try:
        if os.path.isdir(path):
            found = set(_expand(path, ["**"]))
        else:
            root, *parts = pathlib.PurePath(path).parts or ("",)
            found = set(_expand(root, parts) if os.path.isabs(root) else _expand("", [root, *parts]))
        files = _once(_regular(map(pathlib.Path, found)))
    except OSError as error:
        raise refusal(error.filename or path, f"cannot be read: {error.strerror or error}") from None
    if not files and os.path.exists(path) and not os.path.isdir(path):
        raise refusal(path, "is no regular file")
    if not files:
        raise refusal(pattern, "there is no such file")
    _check_snapshot(files)
    return files


def refusal(path: str | os.PathLike[str], why: str, place: str = "") -> DataError:
    """The error about a file, in one line; `place` is in the file, such as `line 3`."""
    name = os.fspath(path)
    name = name if name.isprintable() else repr(name)
    return DataError(f"config.data.name: {name}{place and f', {place}'}: {why}")


def _expand(base: str, parts: list[str]) -> Iterator[str]:
    """The paths under `base` that these parts of a path name; a part that exists is no pattern."""
    if not parts:
        yield base
        return
    part, rest = parts[0], parts[1:]
    if os.path.lexists(os.path.join(base, part)):
        yield from _expand(os.path.join(base, part), rest)
    elif part == "**":
        for folder in _folders(base):
            yield from _expand(folder, rest or ["*"])
    elif glob.has_magic(part):
        for name in glob.glob(part, root_dir=base or None):
            yield from _expand(os.path.join(base, name), rest)


def _folders(top: str) -> Iterator[str]:
    """The folder and all visible ones under it, each once; those that only links lead to come last."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    waiting = [top]
    while waiting:
        for folder, names, _ in os.walk(waiting.pop(0) or ".", onerror=fail):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            names[:] = sorted(name for name in names if not name.startswith("."))
            paths = [os.path.join(folder, name) for name in names]
            waiting += [path for path in paths if os.path.islink(path)]
            yield folder


def _regular(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    found = []
    for path in paths:
        if path.is_file():
            found.append(path)
        elif path.is_symlink() and not path.exists():
            raise refusal(path, f"is a link to {os.readlink(path)}, which is not there")
    return found


def _once(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Sorted, each file by one of its names: one without links, if there is any."""
    named: dict[object, pathlib.Path] = {}
    for path in sorted(paths, key=lambda path: (os.path.realpath(path) != os.path.abspath(path), path)):
        status = path.stat()
        named.setdefault((status.st_dev, status.st_ino) if status.st_ino else path, path)
    return sorted(named.values())


def _check_snapshot(files: Iterable[pathlib.Path]) -> None:
    """Raises DataError where a file is of a hub cache, but not of a snapshot: each is there several times."""
    for file in files:
        for folder in pathlib.Path(os.path.abspath(file)).parents:
            snapshots = folder.parent / "snapshots"
            if folder.name in ("blobs", "refs") and snapshots.is_dir():
                names = ", ".join(sorted(os.listdir(snapshots)))
                problem = f"is a cache of the Hugging Face hub; name a folder in its snapshots: {names}"
                raise refusal(folder.parent, problem)


FOLDER = "text_files"  # of the prepared data sets, under the root of all

_RECORDS = ".files"
_WAIT_SECONDS = 24 * 3600.0
_SETTLED_NS = 2_000_000_000  # a file that changed later than this before it was read may change unseen

# Size in bytes, and the times of the last change of content and of status, in ns.
_Status = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class FileDigests:
    """Some files with digests of their content, and a record of them for the next time.

    A file is read anew if its size, its modification time or its status' time is another than in the record.
    """

    files: Sequence[pathlib.Path]
    digest: str
    """Of the feature, and the names and contents of all files: the same on every machine."""
    contents: Mapping[str, str]
    """The digest of each file, by its absolute path."""
    statuses: Mapping[str, _Status]
    record: pathlib.Path

    def check_unchanged(self) -> None:
        """Raises DataError if a file is not any more what it was when its digest was made."""
        for file in self.files:
            try:
                same = _status(file) == self.statuses[os.path.abspath(file)]
            except OSError:
                same = False
            if not same:
                raise refusal(file, "changed while it was being prepared; start again once it is complete")


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
        saved = read_json(record)
        contents = _unchanged(found, saved)
        if len(contents) < len(found):
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # a root that cannot be written to
                    stack.enter_context(preparation.sole_preparer(record.parent, _WAIT_SECONDS))
                saved = read_json(record)
                contents = _read(found, _unchanged(found, saved), record)
    except OSError as error:
        raise refusal(error.filename or pattern, f"cannot be read: {error.strerror or error}") from None
    digest = hashlib.blake2b(feature.encode(), digest_size=8)
    for file in files:
        digest.update(b"\0" + os.fsencode(file.name) + b"\0" + contents[os.path.abspath(file)].encode())
    return FileDigests(files, digest.hexdigest(), contents, found, record)


def _status(file: str | pathlib.Path) -> _Status:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unchanged(found: Mapping[str, _Status], saved: Mapping[str, Any]) -> dict[str, str]:
    """The recorded digests of the files that are as they were."""
    known = saved.get("files", {})
    return {
        path: known[path][-1] for path, status in found.items() if known.get(path, [])[:-1] == list(status)
    }


def _read(found: Mapping[str, _Status], contents: dict[str, str], record: pathlib.Path) -> dict[str, str]:
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
    with contextlib.suppress(OSError):  # it is only for the next time
        write_json(record, {"files": files})
    return contents


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)
