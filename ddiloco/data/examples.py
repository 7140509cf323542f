"""Batches of single examples, each made from one record of labelled images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from ddiloco.data.batches import Batch, Batches, Selection, make_batches
from ddiloco.data.settings import ImagesConfig
from ddiloco.data.sources import ImageSource

Example = dict[str, Any]
Record = dict[str, Any]


class Examples:
    """The endless examples of one shard; their position is the number of the next one."""

    def __init__(self, example: Callable[[int], Example]) -> None:
        """`example` gives example n = 0, 1, ... without end, the same one each time."""
        self._example = example
        self.position = 0

    def take(self, count: int) -> Batch:
        """The next `count` examples, stacked."""
        found = [self._example(n) for n in range(self.position, self.position + count)]
        self.position += count
        return {name: np.stack([example[name] for example in found]) for name in found[0]}


def make_example_batches(
    config: ImagesConfig,
    source: ImageSource,
    selection: Selection,
    example: Callable[[Record, Sequence[Record], np.random.Generator], Example],
    identity: dict[str, Any],
) -> Batches:
    """The endless training batches of the selected shards.

    Example n of a shard is made from the shard's n-th record and from random numbers that depend on seed,
    shard and n alone: `example` is (record, all records of the shard, random numbers) -> the arrays of one
    row. Otherwise as `make_batches`.
    """

    def read(order: grain.MapDataset, records: grain.MapDataset, seed: int) -> grain.MapDataset:
        return order.random_map(lambda record, rng: example(record, records, rng), seed=seed)

    identity = {"data_set": source.full_name, **identity}
    return make_batches(config, source, selection, read, lambda made, _: Examples(made), identity)


def held_out_examples(
    example: Callable[[int], Example], available: int, batch_size: int, num_batches: int
) -> list[Batch]:
    """Batches of examples evenly spaced over 0 .. available - 1, each at most once.

    With fewer examples there are fewer batches, the last one filled up with zeros, `weights` too.
    """
    wanted = min(batch_size * num_batches, available)
    found = [example(i * available // wanted) for i in range(wanted)]
    empty = {name: np.zeros_like(array) for name, array in found[0].items()}
    found += [empty] * (-wanted % batch_size)
    return [
        {name: np.stack([row[name] for row in found[start : start + batch_size]]) for name in empty}
        for start in range(0, len(found), batch_size)
    ]
