"""The files that a path names: each real file once, and of a Hugging Face hub cache one snapshot."""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Iterable, Iterator

from ddiloco.data.errors import DataError


def is_path(name: str) -> bool:
    """Whether the name of a data set is a path of files."""
    return name.startswith(("/", "./", "../", "~"))


def text_files(pattern: str) -> list[pathlib.Path]:
    """The files that a path names, sorted: one, those matched by a glob, or all visible ones under a folder.

    A part of the path that exists as it is written is no pattern. A file with several names, by links, is
    one file. Of a hub cache (`datasets--*/snapshots`) only the snapshot that `refs/main` names is read.

    Raises:
      DataError: there are none, a folder cannot be listed, or a link leads nowhere.
    """
    path = os.path.expanduser(pattern)
    try:
        if os.path.isdir(path):
            found = set(_expand(path, ["**"]))
        else:
            root, *parts = pathlib.PurePath(path).parts or ("",)
            found = set(_expand(root, parts) if os.path.isabs(root) else _expand("", [root, *parts]))
        files = _once(_of_one_snapshot(_regular(map(pathlib.Path, found))))
    except OSError as error:
        raise refusal(error.filename or path, f"cannot be read: {error.strerror or error}") from None
    if not files and os.path.exists(path) and not os.path.isdir(path):
        raise refusal(path, "is no regular file")
    if not files:
        raise refusal(pattern, "there is no such file")
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


def _of_one_snapshot(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Without what a hub cache holds beside one snapshot: blobs, refs and other snapshots."""
    known: dict[pathlib.Path, bool] = {}
    outside: list[pathlib.Path] = []
    caches: dict[pathlib.Path, dict[str, list[pathlib.Path]]] = {}
    for path in paths:
        for folder in pathlib.Path(os.path.abspath(path)).parents:
            if folder not in known:
                known[folder] = _is_hub_cache(folder)
            if known[folder]:
                first, *others = pathlib.Path(os.path.abspath(path)).relative_to(folder).parts
                snapshot = others[0] if first == "snapshots" and len(others) > 1 else ""
                caches.setdefault(folder, {}).setdefault(snapshot, []).append(path)
                break
        else:
            outside.append(path)
    beside = {folder.parent for folder in caches}  # the hub's folder has a version and a tag of its own
    kept = [path for path in outside if pathlib.Path(os.path.abspath(path)).parent not in beside]
    for folder, snapshots in caches.items():
        kept += snapshots[_snapshot(folder, [name for name in snapshots if name])]
    return kept


def _is_hub_cache(folder: pathlib.Path) -> bool:
    others = (folder / "blobs", folder / "refs")
    return (folder / "snapshots").is_dir() and any(other.is_dir() for other in others)


def _snapshot(folder: pathlib.Path, names: list[str]) -> str:
    """The snapshot of a cache to read; "" if these are none."""
    if len(names) <= 1:
        return "".join(names)
    try:
        main = (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        main = ""
    if main not in names:
        problem = (
            f"has the snapshots {', '.join(sorted(names))}, and refs/main is none of them; name one's folder"
        )
        raise refusal(folder, problem)
    return main
