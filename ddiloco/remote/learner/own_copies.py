"""A learner's own copies of its inner optimizer state on disk: each host's blocks, of the same step boundary.

A copy has a number. Where a learner is several hosts, host 0 draws it; one that died may lack the newest, so
each keeps two, and the learner goes on from the newest copy that all its hosts have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from ddiloco.arrays.blocks import Blocks, held, slices
from ddiloco.arrays.finite import NotFiniteError, check_state
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.likeness import alike, profile
from ddiloco.storage import array_file
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.telemetry.records import reason
from ddiloco.workers.exchange import InnerState

KEPT = 2  # by each of several hosts
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


class OwnCopies:
    """The copies of one host in a folder; None: none are kept. For one thread at a time."""

    def __init__(self, folder: epath.Path | None, inner: InnerFormat, host: int = 0) -> None:
        self.folder = folder
        self._host, self._inner = host, inner
        self._last: int | None = None  # of those saved
        self._at_hand: dict[int, tuple[dict[str, Any], list[Blocks]]] = {}  # what `load` need not read
        self._swept = folder is None or array_file.in_bucket(folder)

    def numbers(self) -> list[int]:
        """The copies that can be read, newest first; the first one stays at hand until `forget`."""
        numbers = []
        for number, found in self._read():
            if not isinstance(found, Exception):
                numbers.append(number)
                self._at_hand = self._at_hand or {number: found}
        return numbers

    def forget(self) -> None:
        """Lets go of the copy that is at hand."""
        self._at_hand = {}

    def newest(self, run: str, among: Collection[int] | None = None) -> InnerState | None:
        """The newest state of this run that can be read, of the copies with these numbers; None: of all.

        Where this is one of several hosts its arrays are `OfAllHosts`. Without any copy there is none.

        Raises:
          ValueError: there are copies, and none can be used; the message is one line.
        """
        problem = "the learner's hosts have no copy in common" if among else ""
        for number, found in self._read(among):
            if isinstance(found, Exception):
                problem = f"{found}"
            elif found[0]["run"] != run:
                problem = f"{self._path(number)}: is of another run"
            else:
                header, blocks = found
                whole = self._inner.whole
                arrays = [block.all for block in blocks] if whole else OfAllHosts(blocks, number)
                origin = None if header["origin"] is None else InnerOrigin(*header["origin"])
                return InnerState(
                    header["step"], tuple(header["versions"]), arrays, origin, header["trained"]
                )
        if problem:
            raise ValueError(f"{problem}: no own copy of the inner optimizer state is used")
        return None

    def keep(self, state: InnerState, run: str) -> None:
        """Keeps a state of this run; returns once it is durable. Raises OSError."""
        about = {
            "run": run,
            "step": state.step,
            "trained": state.trained,
            "versions": list(state.versions),
            "origin": None if state.origin is None else dataclasses.astuple(state.origin),
        }
        number = state.arrays.number if isinstance(state.arrays, OfAllHosts) else new_number()
        self.save(number, state.arrays, about)

    def save(self, number: int, arrays: Sequence[Any], about: Mapping[str, Any] | None = None) -> None:
        """Keeps this host's blocks of the arrays in place of older ones; raises OSError.

        `about`: what host 0 keeps with them.
        """
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        blocks = [Blocks.whole(np.asarray(one)) if self._inner.whole else held(one) for one in arrays]
        needs = self._inner.needs
        header = {**(about or {}), "format": self._inner.fingerprint, "number": number, "cuts": needs}
        parts = [one[slices(box)] for one, cut in zip(blocks, needs, strict=True) for box in cut.boxes]
        array_file.save(self._path(number), _MAGIC, header, parts)
        others = [path for path in self._paths() if path.suffix != f".{number}"]
        others.sort(key=lambda path: path.suffix != f".{self._last}")  # else the newest of another process
        for old in others[0 if self._inner.whole else KEPT - 1 :]:
            old.unlink(missing_ok=True)
        self._last = number

    def load(self, number: int) -> tuple[dict[str, Any], list[Blocks]]:
        """What was kept with the copy, and this host's blocks; raises ValueError or FileNotFoundError."""
        if number in self._at_hand:
            return self._at_hand[number]
        header, parts = array_file.load(self._path(number), _MAGIC)
        if header["format"] != self._inner.fingerprint:
            raise ValueError(f"{self._path(number)}: is of another inner optimizer")
        if header["cuts"] != json.loads(json.dumps(self._inner.needs)):
            raise ValueError(f"{self._path(number)}: is of another mesh")
        numbered = self._numbered(parts)
        try:
            check_state((f"array {i} of the inner optimizer", part) for i, part in numbered)
        except NotFiniteError as error:
            raise ValueError(f"{self._path(number)}: {error}") from None
        left = iter(parts)
        cuts = self._inner.needs
        return header, [Blocks(cut.shape, {box: next(left) for box in cut.boxes}) for cut in cuts]

    def _numbered(self, parts: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Each block of a copy, with the number of its array."""
        numbers = [i for i, cut in enumerate(self._inner.needs) for _ in cut.boxes]
        return zip(numbers, parts, strict=True)

    def check_like(self, number: int, blocks: Sequence[Blocks]) -> None:
        """Raises ValueError where a peer's blocks are unlike those of this copy; 0: of none."""
        if not number:
            return
        try:
            known = profile(self.load(number)[1])
        except OSError as error:
            raise ValueError(f"the own copy cannot be read: {reason(error)}") from None
        if not alike(known, profile(blocks)):
            raise ValueError("they are unlike the own copy")

    def _read(
        self, among: Collection[int] | None = None
    ) -> Iterator[tuple[int, tuple[dict[str, Any], list[Blocks]] | Exception]]:
        """Each copy, newest first: its number, and what `load` gives of it or raises; 0: of all of them."""
        try:
            paths = self._paths()
        except OSError as error:
            yield 0, OSError(f"{self.folder}: cannot be listed: {reason(error)}")
            return
        for path in paths:
            number = int(path.suffix[1:])
            if among is None or number in among:
                try:
                    yield number, self.load(number)
                except (OSError, ValueError) as error:
                    yield number, error

    def _path(self, number: int) -> epath.Path:
        assert self.folder is not None
        return self.folder / f"inner_state.{self._host}.{number}"

    def _paths(self) -> list[epath.Path]:
        """Of all copies, newest first; raises OSError."""
        if self.folder is None:
            return []
        if not self._swept:  # of what a kill has left; not before, as the disk may hang
            self._swept = True
            array_file.sweep(pathlib.Path(self.folder), f"inner_state.{self._host}.")
        found, ours = [], f"inner_state.{self._host}."
        with array_file.as_os_error(self.folder), contextlib.suppress(FileNotFoundError):
            # Not by a pattern, which the folder's own name would be part of.
            named = [path for path in self.folder.iterdir() if path.name.startswith(ours)]
            found = [path for path in named if path.suffix[1:].isdigit()]
        return sorted(found, key=lambda path: int(path.suffix[1:]), reverse=True)
