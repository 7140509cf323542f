"""One host's part of a learner's batches, where the learner's devices are those of several hosts.

A learner's shard may be divided into sub-shards, each with its rows of every batch. Which these are does not
depend on the number of hosts: a host reads those that its devices have rows of, and other hosts may read
the same. So positions stay exact when that number changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.arrays.blocks import Blocks, Box
from ddiloco.data.batches import Batches


class HostBatch(NamedTuple):
    """One host's part of a batch."""

    rows: (
        Any  # by array, `Blocks` of the rows that were read, numbered as in the whole batch; or a loop's own
    )
    tokens: dict[int, int]  # by sub-shard, the targets that count


class HostBatches(Iterator[HostBatch]):
    """One host's part of each batch; its state is a `Batches` state of the sub-shards that it reads."""

    def __init__(self, read: Batches, own: Sequence[int], shards: Sequence[int], rows: int) -> None:
        """`read` gives rows of the sub-shards `own`, of those of the learner, whose batch has `rows` rows."""
        self._read, self._own = read, own
        self._each, self._rows = rows // len(shards), rows
        self._runs = list(_runs([shards.index(shard) for shard in own]))

    def __next__(self) -> HostBatch:
        batch = next(self._read)
        counts = batch["weights"].reshape(len(self._own), -1).sum(axis=1)
        tokens = {shard: int(count) for shard, count in zip(self._own, counts, strict=True)}
        return HostBatch({name: self._placed(array) for name, array in batch.items()}, tokens)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, for `joined`."""
        return self._read.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where the whole learner's state was taken; raises DataError if that is of other data."""
        shards = state["shards"]
        own = {str(shard): shards[str(shard)] for shard in self._own if str(shard) in shards}
        self._read.set_state({**state, "shards": own})

    @staticmethod
    def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The whole learner's state from those of its hosts after the same batch."""
        shards = {shard: at for state in states for shard, at in state["shards"].items()}
        return {**states[0], "shards": shards}

    def _placed(self, array: np.ndarray) -> Blocks:
        whole = tuple((0, size) for size in array.shape[1:])
        blocks, at = {}, 0
        for first, stop in self._runs:
            count = (stop - first) * self._each
            blocks[((first * self._each, stop * self._each), *whole)] = array[at : at + count]
            at += count
        return Blocks((self._rows, *array.shape[1:]), blocks)


def shards_of_rows(boxes: Iterable[Box], shards: Sequence[int], rows: int) -> tuple[int, ...]:
    """Those of the sub-shards that have any of these rows of a batch.

    >>> shards_of_rows([((0, 2),), ((6, 8),)], shards=(4, 5, 6, 7), rows=8)
    (4, 7)
    """
    each = rows // len(shards)
    found = {row // each for ((start, stop), *_) in boxes for row in range(start, stop)}
    return tuple(shards[i] for i in sorted(found))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and stop of each run of neighbours.

    >>> list(_runs([0, 1, 3]))
    [(0, 2), (3, 4)]
    """
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i
