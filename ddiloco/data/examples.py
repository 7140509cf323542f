"""Streams and held-out batches of single examples, for data whose rows are not cut from something longer."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from ddiloco.data.dealing import DealtStream
from ddiloco.data.errors import DataError
from ddiloco.data.packing import Batch
from ddiloco.data.pipeline import Batches, check_shards, shard_seed
from ddiloco.data.settings import ImagesConfig

Example = dict[str, np.ndarray]
Randomly = Callable[[Any, np.random.Generator], Example]


class Examples:
    """The endless examples of one shard, each by its number: nothing but the number is to be remembered.

    Args:
      example: gives example n = 0, 1, ... without end; the same one each time.
      threads: that make the examples of a batch; 0: the one that asks.
    """

    def __init__(self, example: Callable[[int], Example], threads: int) -> None:
        self._example = example
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "examples") if threads else None
        self.position = 0

    def take(self, count: int) -> Batch:
        """The next `count` examples, stacked."""
        numbers = range(self.position, self.position + count)
        found = list((self._pool.map if self._pool else map)(self._example, numbers))
        self.position += count
        return {name: np.stack([example[name] for example in found]) for name in found[0]}


def make_example_batches(
    config: ImagesConfig,
    source: Sequence[Any],
    made_of: Callable[[grain.MapDataset], Randomly],
    identity: dict[str, Any],
    *,
    shards: Sequence[int],
    num_shards: int,
    batch_size: int,
    seed: int,
) -> Batches:
    """The endless training batches of some shards, with `shards` and the rest as in `make_batches`.

    Record i of the source belongs to shard i % num_shards. Example n of a shard is made of its n-th record,
    in an order of each epoch's own, and of random numbers that depend on seed, shard and n alone.

    Args:
      config: the data set and how it is read.
      source: its records.
      made_of: given a shard's records, what makes an example of a record and a generator.
      identity: what else a saved position must agree with.

    Raises:
      ConfigError: shards or batch_size do not fit.
      DataError: there are fewer records than shards.
    """
    check_shards(shards, num_shards, batch_size)
    if len(source) < num_shards:
        raise DataError(
            f"{config.name} has {len(source)} images in split {config.train_split}, too few for "
            f"{num_shards} shards; use fewer learners or a larger split"
        )

    def by_itself(shard: int, num_shards: int) -> Callable[[int], Example]:
        records = grain.MapDataset.source(source)[shard::num_shards]
        order = records.shuffle(seed=shard_seed(seed, shard)) if config.shuffle else records
        return order.repeat().random_map(made_of(records), seed=shard_seed(seed, shard)).__getitem__

    def stacked(example: Callable[[int], tuple[Example, int]]) -> Examples:
        return Examples(lambda number: example(number)[0], config.threads)

    streams = {shard: DealtStream(by_itself, stacked, shard, num_shards, len(source)) for shard in shards}
    same = {
        "records": len(source),
        "split": config.train_split,
        "shuffle": config.shuffle,
        "seed": seed,
        "num_shards": num_shards,
        **identity,
    }
    return Batches(streams, batch_size // len(shards), same, config.prefetch)


def spaced_batches(
    example: Callable[[int], Example], having: int, batch_size: int, num_batches: int
) -> list[Batch]:
    """Batches of examples evenly spaced over 0 .. having - 1, each at most once.

    Where there are fewer than asked for there are fewer batches, the last filled up with zeros, which by
    their `weights` do not count.
    """
    wanted = min(batch_size * num_batches, having)
    found = [example(i * having // wanted) for i in range(wanted)]
    empty = {name: np.zeros_like(array) for name, array in found[0].items()}
    found += [empty] * (-wanted % batch_size)
    return [
        {name: np.stack([row[name] for row in found[start : start + batch_size]]) for name in empty}
        for start in range(0, len(found), batch_size)
    ]
