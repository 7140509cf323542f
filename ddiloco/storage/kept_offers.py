"""Merges that can be made again: a fragment's state before, and the encoded offers, on the syncer's disk.

A share of all merges is kept, chosen by the signatures under the offers of the fragment's next merge: when
the syncer makes a version, it cannot know whether that will be checked.
"""

from __future__ import annotations

import hashlib
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import numpy as np
from etils import epath

from ddiloco.outer.global_model import FragmentState
from ddiloco.storage import array_file

FOLDER = "offers"  # in the workdir
_MAGIC = b"ddiloco kept offers 1\n"
_BEFORE = "before"


def is_kept(share: float, next_signatures: Iterable[bytes]) -> bool:
    """Whether a merge is of the share that is kept; `next_signatures`: under the offers of the next one."""
    drawn = hashlib.sha256(b"".join(sorted(next_signatures))).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64


class KeptOffers:
    """The kept merges of a run. Several threads may write, each another fragment."""

    def __init__(self, workdir: pathlib.Path, share: float) -> None:
        """`share`: of merges that stay."""
        self._folder, self._share = workdir / FOLDER, share

    def _of(self, fragment: int, version: int) -> pathlib.Path:
        return self._folder / f"fragment-{fragment:04d}" / str(version)

    def save(
        self, fragment: int, version: int, before: FragmentState, offers: Iterable[Sequence[np.ndarray]]
    ) -> None:
        """Keeps what a version is made of; offers in the order of the merge. Raises OSError."""
        folder = self._of(fragment, version)
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed before it had committed
        folder.mkdir(parents=True)
        counts = {"version": before.version, "pieces": len(before.pieces)}
        state = [*before.pieces, *before.optimizer]
        array_file.save(epath.Path(folder / _BEFORE), _MAGIC, counts, state)
        for number, arrays in enumerate(offers):
            array_file.save(epath.Path(folder / str(number)), _MAGIC, {}, arrays)

    def choose(self, fragment: int, version: int, next_signatures: Iterable[bytes]) -> None:
        """Drops what a version is made of, unless it is of the share; raises OSError."""
        if (folder := self._of(fragment, version)).exists() and not is_kept(self._share, next_signatures):
            shutil.rmtree(folder)

    def load(self, fragment: int, version: int) -> tuple[FragmentState, list[Sequence[np.ndarray]]]:
        """What a version is made of. Raises FileNotFoundError if it is not kept, ValueError if damaged."""
        folder = self._of(fragment, version)
        header, arrays = array_file.load(epath.Path(folder / _BEFORE), _MAGIC)
        count = int(header["pieces"])
        before = FragmentState(int(header["version"]), tuple(arrays[:count]), tuple(arrays[count:]))
        numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        offers = [array_file.load(epath.Path(folder / str(n)), _MAGIC)[1] for n in numbers]
        return before, offers
