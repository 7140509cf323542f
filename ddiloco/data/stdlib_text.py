"""A TFDS builder of real text that needs no network: the source code of Python's standard library.

Importing this module imports TFDS and registers the builder as `stdlib_text`.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Iterator

import tensorflow_datasets as tfds

from ddiloco.data.tfds_builder import LocalBuilder, one_in

VALIDATION_ONE_IN = 20

# Installed packages, and CPython's own tests: more than half of the bytes, much of it tables.
_LEFT_OUT_AT_TOP = frozenset({"site-packages", "dist-packages", "test"})


def standard_library_files(root: str | os.PathLike[str]) -> list[str]:
    """The `.py` files under `root`, sorted paths relative to it, without installed packages and tests."""
    root = pathlib.Path(root)
    found = []
    for folder, subfolders, files in os.walk(root):
        at_top = pathlib.Path(folder) == root
        subfolders[:] = [
            name for name in subfolders if name != "__pycache__" and not (at_top and name in _LEFT_OUT_AT_TOP)
        ]
        relative = pathlib.Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def split_of(path: str) -> str:
    """`train` or `validation` (about one file in 20), by a hash of the relative path."""
    return "validation" if one_in(VALIDATION_ONE_IN, path) else "train"


def documents(root: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Pairs (relative path, text) in the order of the paths.

    Leaves out files that are empty, unreadable or not UTF-8, and files with the content of an earlier one, so
    that no text is in both splits.
    """
    seen = set()
    for path in standard_library_files(root):
        try:
            content = pathlib.Path(root, path).read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if content and digest not in seen:
            seen.add(digest)
            yield path, text


def _interpreter() -> str:
    """A name for this interpreter's library; a patched library of the same version has another name."""
    root = sysconfig.get_path("stdlib")
    listing = hashlib.blake2b(digest_size=4)
    for path in standard_library_files(root):
        size = os.stat(os.path.join(root, path), follow_symlinks=False).st_size
        listing.update(f"{path}\0{size}\n".encode())
    return f"{sys.implementation.name}-{platform.python_version()}-{listing.hexdigest()}"


class StdlibText(LocalBuilder):
    """The `.py` files of the running interpreter's standard library, one document each, in order of path.

    Features: `text` (the file) and `path` (relative to the library). Splits: `train` and `validation`, by a
    hash of the path. The config's name holds the Python version, so that no two interpreters share files.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS wants a list here)
        tfds.core.BuilderConfig(name=_interpreter(), description="the library of the running interpreter")
    ]
    SPLITS = ("train", "validation")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Source code of Python's standard library.",
            features=tfds.features.FeaturesDict(
                {"text": tfds.features.Text(doc="one file"), "path": tfds.features.Text(doc="relative path")}
            ),
            disable_shuffling=True,
        )

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        for path, text in documents(sysconfig.get_path("stdlib")):
            if split_of(path) == split:
                yield path, {"text": text, "path": path}
