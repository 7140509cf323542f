"""Batches of tokens: shard, shuffle, repeat, tokenize, pack, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.dealing import DealtStream, Stream, share
from ddiloco.data.errors import DataError
from ddiloco.data.packing import Batch, InterleavedRows, join, rows, windows
from ddiloco.data.settings import DataConfig
from ddiloco.data.sources import open_text
from ddiloco.data.tokenizers import Tokenizer

__all__ = ["Batches", "DataConfig", "held_out_batches", "make_batches"]

_HELD_OUT_SEED = 0


def make_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    shards: Sequence[int],
    num_shards: int,
    batch_size: int,
    seed: int,
) -> Batches:
    """The endless training batches of some shards.

    Document i of the split belongs to shard i % num_shards. A batch is the rows of each shard in turn,
    batch_size / len(shards) of each: shards=(0, 1) with batch_size 2b sees at every step just what two
    readers, shards=(0,) and shards=(1,) with batch_size b, see together.

    Args:
      config: the data set and its rows.
      tokenizer: gives the ids.
      shards: the shards to draw from, each in [0, num_shards).
      num_shards: shards that the documents are divided among.
      batch_size: rows in a batch, B.
      seed: of the order of documents; each shard and each epoch has its own order.

    Raises:
      ConfigError: shards or batch_size do not fit.
      DataError: the data set cannot be opened, or has fewer documents than shards.
    """
    check_shards(shards, num_shards, batch_size)
    source = open_text(config.name, config.train_split, config.data_dir, feature=config.text_feature)
    if len(source) < num_shards:
        raise DataError(
            f"{config.name} has {len(source)} documents in split {config.train_split}, too few for "
            f"{num_shards} shards; use fewer learners or a larger split"
        )

    def by_itself(shard: int, num_shards: int) -> Callable[[int], np.ndarray]:
        documents = grain.MapDataset.source(source)[shard::num_shards]
        if config.shuffle:
            documents = documents.shuffle(seed=shard_seed(seed, shard))
        return documents.repeat().map(_to_tokens(tokenizer)).__getitem__

    def stream(shard: int) -> Stream:
        lanes = min(config.interleave, share(len(source), shard, num_shards))

        def packed(document: Callable[[int], tuple[np.ndarray, int]]) -> Stream:
            def left_of(number: int) -> np.ndarray:
                tokens, read = document(number)
                return tokens[read:]

            return InterleavedRows(left_of, len(source), config.sequence_length, lanes)

        return DealtStream(by_itself, packed, shard, num_shards, len(source))

    streams = {shard: stream(shard) for shard in shards}
    identity = {
        "data_set": source.full_name,
        "records": len(source),
        "split": config.train_split,
        "text_feature": config.text_feature,
        "tokenizer": tokenizer.fingerprint,
        "shuffle": config.shuffle,
        "interleave": config.interleave,
        "seed": seed,
        "num_shards": num_shards,
    }
    return Batches(streams, batch_size // len(shards), identity, config.prefetch)


class Batches(Iterator[Batch]):
    """An endless iterator of batches whose state, a dict of JSON values, resumes it exactly.

    The state holds a position per shard: another batch size, or of text another row length, may follow.
    """

    def __init__(
        self, streams: Mapping[int, Stream], rows_each: int, identity: dict[str, Any], prefetch: int
    ) -> None:
        self._identity = identity
        self._shards = sorted(streams)
        self._source: Any = _Drawing(streams, rows_each)
        if prefetch:
            self._source = grain.experimental.ThreadPrefetchDatasetIterator(self._source, prefetch)
        self._batches = 0
        self._tokens = 0

    @property
    def batches(self) -> int:
        """Batches handed out so far, also before a resumption."""
        return self._batches

    @property
    def tokens(self) -> int:
        """Targets of weight 1 handed out so far, also before a resumption."""
        return self._tokens

    def __next__(self) -> Batch:
        batch = next(self._source)
        self._batches += 1
        self._tokens += int(batch["weights"].sum())
        return batch

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to continue after the last batch handed out; JSON values only."""
        return {
            "stream": dict(self._identity),
            "shards": self._source.get_state(),
            "batches": self._batches,
            "tokens": self._tokens,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
          DataError: the state is of other data, another order or other shards.
        """
        then, now = state["stream"], self._identity
        changes = [f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]
        shards = sorted(map(int, state["shards"]))
        if shards != self._shards:
            changes.append(f"shards were {shards}, are {self._shards}")
        if changes:
            raise DataError(f"the saved position is of another stream: {'; '.join(changes)}")
        self._source.set_state(state["shards"])
        self._batches = state["batches"]
        self._tokens = state["tokens"]

    def close(self) -> None:
        """Ends the prefetching thread, if there is one."""
        if hasattr(self._source, "close"):
            self._source.close()


class _Drawing(Iterator[Batch]):
    """Draws rows from each shard's stream in turn; Grain's prefetching may run it ahead in a thread."""

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


def held_out_batches(
    config: DataConfig, tokenizer: Tokenizer, batch_size: int, num_batches: int
) -> list[Batch]:
    """The same held-out batches for everybody: rows evenly spaced over the packed eval split.

    Of a large split only the first `held_out_pool` tokens, in a fixed shuffled order of documents, are read.
    A split with fewer rows than asked for gives fewer batches, the last one padded; no token is scored twice.

    Raises:
      DataError: the split cannot be opened or has nothing to score.
    """
    source = open_text(config.name, config.eval_split, config.data_dir, feature=config.text_feature)
    documents = grain.MapDataset.source(source).shuffle(seed=_HELD_OUT_SEED).map(_to_tokens(tokenizer))
    pieces, pooled = [], 0
    for index in range(len(documents)):
        piece = documents[index]
        if len(piece):
            pieces.append(piece)
            pooled += len(piece)
        if pooled >= config.held_out_pool:
            break
    length, wanted = config.sequence_length, batch_size * num_batches
    having = -(-max(pooled - 1, 1) // length)
    if wanted >= having:
        wanted = -(-having // batch_size) * batch_size
        chosen = np.arange(wanted)
    else:
        chosen = np.arange(wanted) * having // wanted
    joined = join(pieces, max(having, wanted) * length + 1, tokenizer.pad)
    packed = rows(*(windows(stream, length)[chosen] for stream in joined))
    if not packed["weights"].any():
        raise DataError(f"{config.name} has nothing to score in split {config.eval_split}")
    return [
        {name: array[start : start + batch_size] for name, array in packed.items()}
        for start in range(0, wanted, batch_size)
    ]


def _to_tokens(tokenizer: Tokenizer) -> Callable[[dict[str, bytes]], np.ndarray]:
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    after = [] if tokenizer.eos is None else [tokenizer.eos]

    def to_tokens(document: dict[str, bytes]) -> np.ndarray:
        ids = tokenizer.encode(document["text"])
        return np.concatenate([before, ids, after], dtype=np.int32, casting="unsafe")

    return to_tokens


def shard_seed(seed: int, shard: int) -> int:
    """A seed far from its neighbours': Grain adds the epoch to it, so near seeds would repeat orders."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1)[0])


def check_shards(shards: Sequence[int], num_shards: int, batch_size: int) -> None:
    if not shards or len(set(shards)) != len(shards) or not all(0 <= shard < num_shards for shard in shards):
        raise ConfigError(f"shards: are {tuple(shards)}, but must be different numbers in [0, {num_shards})")
    if batch_size < 1 or batch_size % len(shards):
        raise ConfigError(f"batch_size: is {batch_size}, but must be a multiple of the {len(shards)} shards")
