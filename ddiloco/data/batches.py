"""Batches of a learner's shards: shuffled, repeated, prefetched, with a state that resumes exactly."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.data.settings import RecordsConfig
from ddiloco.data.shards import ShardStream, Stream, from_its_end

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The shards whose rows make up a batch.

    Record i of a data set belongs to shard i % num_shards. A batch holds the rows of each selected shard in
    turn, batch_size / len(shards) of each: shards=(0, 1) with batch_size 2b sees at every step what two
    readers, shards=(0,) and shards=(1,) with batch_size b, see together.

    Raises:
      ConfigError: shards or batch_size do not fit.
    """

    # The selected ones, each in [0, num_shards), or num_shards more for its second reader
    shards: Sequence[int]
    num_shards: int  # into how many shards the records are divided
    batch_size: int  # rows in a batch, B
    seed: int  # of the order of records; each shard and each epoch has its own order

    def __post_init__(self) -> None:
        m, shards = self.num_shards, self.shards
        if not shards or len(set(shards)) != len(shards) or not all(0 <= shard < 2 * m for shard in shards):
            raise ConfigError(f"shards: are {tuple(shards)}, but must be different numbers in [0, {2 * m})")
        if self.batch_size < 1 or self.batch_size % len(shards):
            raise ConfigError(
                f"batch_size: is {self.batch_size}, but must be a multiple of the {len(shards)} shards"
            )


class Batches(Iterator[Batch]):
    """An endless iterator of batches whose state, a dict of JSON values, resumes it exactly.

    The state holds a position for each shard, so it also fits another batch size or, for text, row length.
    """

    def __init__(
        self, streams: Mapping[int, Stream], rows_each: int, identity: dict[str, Any], prefetch: int
    ) -> None:
        """Draws `rows_each` rows from each stream; `identity` is what a state must agree with."""
        self._identity = identity
        self._shards = sorted(streams)
        self._source: Any = _RowsInTurn(streams, rows_each)
        if prefetch:
            self._source = grain.experimental.ThreadPrefetchDatasetIterator(self._source, prefetch)
        self.batches = 0
        """Batches returned, since the first start of the run."""

    def __next__(self) -> Batch:
        batch = next(self._source)
        self.batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to continue after the last batch returned; JSON values only."""
        return {
            "stream": dict(self._identity),
            "shards": self._source.get_state(),
            "batches": self.batches,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; raises DataError if that was in another stream."""
        then, now = state["stream"], self._identity
        changes = [f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]
        shards = sorted(map(int, state["shards"]))
        if shards != self._shards:
            changes.append(f"shards were {shards}, are {self._shards}")
        if changes:
            raise DataError(f"the saved position is of another stream: {'; '.join(changes)}")
        self._source.set_state(state["shards"])
        self.batches = state["batches"]

    def close(self) -> None:
        """Ends the prefetching thread, if there is one."""
        if hasattr(self._source, "close"):
            self._source.close()


class _RowsInTurn(Iterator[Batch]):
    """Equally many rows from each shard's stream; Grain may run it ahead in a thread."""

    def __init__(self, streams: Mapping[int, Stream], rows_each: int) -> None:
        self._streams = streams
        self._rows_each = rows_each

    def __next__(self) -> Batch:
        parts = [stream.take(self._rows_each) for stream in self._streams.values()]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def get_state(self) -> dict[str, Any]:
        return {str(shard): stream.position for shard, stream in self._streams.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for shard, stream in self._streams.items():
            stream.position = state[str(shard)]


def make_batches(
    config: RecordsConfig,
    source: Sequence[Any],
    selection: Selection,
    read: Callable[[grain.MapDataset, grain.MapDataset, int], grain.MapDataset],
    rows: Callable[[Callable[[int], Any], int], Stream],
    identity: dict[str, Any],
) -> Batches:
    """The endless training batches of the selected shards.

    Args:
      read: (a shard's records in reading order without end, the same once in the source's order, a seed) ->
        the items that rows are made of.
      rows: (a function of n: the n-th item of `read`, shard) -> the shard's rows.
      identity: further values that a saved state must agree with.

    Raises:
      DataError: there are fewer records than shards.
    """
    s, count = selection, len(source)
    if count < s.num_shards:
        raise DataError(
            f"config.data.train_split: {config.name} has {count} records in split {config.train_split}, "
            f"too few for {s.num_shards} shards; use fewer learners or a larger split"
        )

    pool = concurrent.futures.ThreadPoolExecutor(config.threads, "records") if config.threads else None

    def by_itself(shard: int, num_shards: int) -> Callable[[int], Any]:
        own = shard % num_shards
        records = grain.MapDataset.source(source)[own::num_shards]
        seed = shard_seed(s.seed, own)
        order = records.shuffle(seed=seed) if config.shuffle else records
        item = read(order.repeat(), records, seed).__getitem__
        if shard == own:
            return item
        return lambda number: item(from_its_end(number, len(records)))

    def stream(shard: int) -> ShardStream:
        return ShardStream(
            by_itself, lambda item: rows(item, shard), shard, s.num_shards, count, pool, 2 * config.threads
        )

    common = {
        "records": count,
        "split": config.train_split,
        "shuffle": config.shuffle,
        "seed": s.seed,
        "num_shards": s.num_shards,
    }
    streams = {shard: stream(shard) for shard in s.shards}
    return Batches(streams, s.batch_size // len(s.shards), {**identity, **common}, config.prefetch)


def shard_seed(seed: int, shard: int) -> int:
    """A seed far from its neighbours': Grain adds the epoch to it, so near seeds would repeat orders."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1)[0])
