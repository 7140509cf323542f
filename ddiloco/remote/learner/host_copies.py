"""Each host's copies of its blocks of the inner optimizer state on disk, taken at the same step boundary.

A copy is named by a number that host 0 draws. A host that died may lack the newest, so two are kept; the
learner goes on from the newest copy that all its hosts have.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from ddiloco.disk import array_file
from ddiloco.outer.blocks import Blocks, held
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.likeness import alike, profile

KEPT = 2
_MAGIC = b"ddiloco inner state of a host 1\n"


class OfAllHosts(list[Any]):
    """One host's part of the inner state's arrays, of which each other host has its own under this number."""

    def __init__(self, arrays: Sequence[Any], number: int) -> None:
        super().__init__(arrays)
        self.number = number


class StateOfAllHosts(dict[str, Any]):
    """One host's part of a learner's arrays, likewise."""

    def __init__(self, arrays: Mapping[str, Any], number: int) -> None:
        super().__init__(arrays)
        self.number = number


def new_number() -> int:
    """A number for a copy that no other has; later ones are larger, unless the clock was set back."""
    return time.time_ns() // 1000 * 4 + secrets.randbelow(4)


class HostCopies:
    """The copies of one host in a folder; None: none are kept. For one thread at a time."""

    def __init__(self, folder: epath.Path | None, host: int, inner: InnerFormat) -> None:
        self._folder, self._host, self._inner = folder, host, inner
        self._last: int | None = None  # of those saved

    def numbers(self) -> list[int]:
        """The copies that can be read, newest first."""
        return [number for number, _, _ in self.readable()]

    def readable(
        self, among: Container[int] | None = None
    ) -> Iterator[tuple[int, dict[str, Any], list[Blocks]]]:
        """Each copy that can be read, newest first: its number, and what `load` gives of it."""
        for path in self._paths():
            number = int(path.suffix[1:])
            if among is not None and number not in among:
                continue
            try:
                header, blocks = self.load(number)
            except (OSError, ValueError, KeyError, TypeError, StopIteration):
                continue
            yield number, header, blocks

    def save(self, number: int, arrays: Sequence[jax.Array], about: dict[str, Any]) -> None:
        """Keeps this host's blocks of the arrays; raises OSError."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        blocks = [held(array) for array in arrays]
        cuts = [[list(one.shape), [list(map(list, box)) for box in one.blocks]] for one in blocks]
        header = {**about, "format": self._inner.fingerprint, "number": number, "cuts": cuts}
        parts = [block for one in blocks for block in one.blocks.values()]
        array_file.save(self._folder / f"inner_state.{self._host}.{number}", _MAGIC, header, parts)
        others = [path for path in self._paths() if path.suffix != f".{number}"]
        others.sort(key=lambda path: path.suffix != f".{self._last}")  # else the newest of another process
        for old in others[KEPT - 1 :]:
            old.unlink(missing_ok=True)
        self._last = number

    def load(self, number: int) -> tuple[dict[str, Any], list[Blocks]]:
        """What was kept with the copy, and this host's blocks; raises OSError or ValueError."""
        assert self._folder is not None
        header, parts = array_file.load(self._folder / f"inner_state.{self._host}.{number}", _MAGIC)
        if header["format"] != self._inner.fingerprint:
            raise ValueError("it is of another inner optimizer")
        left: Iterator[Any] = iter(parts)
        found = []
        for shape, boxes in header["cuts"]:
            keys = [tuple((start, stop) for start, stop in box) for box in boxes]
            found.append(Blocks(shape, {key: next(left) for key in keys}))
        return header, found

    def check_like(self, number: int, blocks: Sequence[Blocks]) -> None:
        """Raises ValueError where a peer's blocks are unlike those of this copy; 0: of none."""
        if not number:
            return
        try:
            known = profile(self.load(number)[1])
        except OSError as error:
            raise ValueError(f"the own copy cannot be read: {error.strerror}") from None
        if not alike(known, profile(blocks)):
            raise ValueError("they are unlike the own copy")

    def _paths(self) -> list[epath.Path]:
        """Of all copies, newest first."""
        found = [] if self._folder is None else self._folder.glob(f"inner_state.{self._host}.*")
        return sorted(
            (path for path in found if path.suffix[1:].isdigit()),
            key=lambda path: int(path.suffix[1:]),
            reverse=True,
        )
