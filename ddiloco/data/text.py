"""Batches of text: documents joined to one stream of tokens, which is cut into rows of L; none is dropped.

Row r of a stream s has inputs s[rL : (r+1)L] and targets s[rL+1 : (r+1)L+1]. So every token is an input once,
and a target once unless a document begins with it. Grain's concatenate-then-split would cut rows of L+1, and
the first token of each row would never be a target. A position in the stream is two integers.
"""

from __future__ import annotations

from collections.abc import Callable

import grain
import numpy as np

from ddiloco.data.batches import Batch, Batches, Selection, make_batches
from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.shards import epoch_size
from ddiloco.data.tokenized import open_tokens
from ddiloco.data.tokenizers import Tokenizer

PADDING = -1


def windows(stream: np.ndarray, length: int) -> np.ndarray:
    """Views (R*length + 1,) as (R, length + 1): each row ends on the first item of the next."""
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]


def rows(tokens: np.ndarray, documents: np.ndarray) -> Batch:
    """Makes rows from windows of a stream, each of L inputs and one more target.

    Args:
      tokens: (R, L + 1) ids.
      documents: (R, L + 1) number of each token's document, counting up by one along a row; PADDING for none.

    Returns:
      (R, L) int32 arrays: `inputs`; `targets`; `segments`, the number of the document in the row, from 1, and
      0 for padding; `positions`, the place in the document's part in this row, from 0; `weights`, 1 where
      input and target are of one document, else 0.
    """
    document = documents[:, :-1]
    real = document != PADDING
    columns = np.arange(document.shape[1], dtype=np.int32)
    starts = np.zeros(document.shape, np.int32)
    np.multiply(document[:, 1:] != document[:, :-1], columns[1:], out=starts[:, 1:])
    positions = columns - np.maximum.accumulate(starts, axis=1)
    return {
        "inputs": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "segments": np.where(real, document - document[:, :1] + 1, 0).astype(np.int32, copy=False),
        "positions": np.where(real, positions, 0).astype(np.int32, copy=False),
        "weights": ((documents[:, 1:] == document) & real).astype(np.int32),
    }


def join(pieces: list[np.ndarray], total: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document numbers, int32, of documents joined and padded to `total`; none may be empty."""
    tokens = np.full(total, pad, np.int32)
    documents = np.full(total, PADDING, np.int32)
    lengths = [len(piece) for piece in pieces]
    if pieces:
        np.concatenate(pieces, out=tokens[: sum(lengths)], casting="same_kind")
        documents[: sum(lengths)] = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    return tokens, documents


class RowStream:
    """Endless rows of documents one after the other, with a position that can be saved and set.

    Args:
      document: the tokens of document i = 0, 1, ... without end.
      epoch: documents in an epoch; an epoch without any token is an error.
      following: the document to read after document i; by default i + 1.
    """

    def __init__(
        self,
        document: Callable[[int], np.ndarray],
        epoch: int,
        length: int,
        first: int = 0,
        following: Callable[[int], int] = lambda document: document + 1,
    ) -> None:
        self._draw = document
        self._epoch = epoch
        self._length = length
        self._following = following
        self._document = first
        self._offset = 0
        self._held: tuple[int, np.ndarray] | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Where the next input token is: the number of its document, and its offset there."""
        return self._document, self._offset

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        self._document, self._offset = position
        self._held = None

    def take(self, count: int) -> Batch:
        """The next `count` rows, (count, L) int32; raises DataError if an epoch of documents has no token."""
        missing = count * self._length + 1
        pieces: list[np.ndarray] = []
        document, offset, empty = self._document, self._offset, 0
        while True:
            piece = self._tokens(document)[offset : offset + missing]
            missing -= len(piece)
            if len(piece):
                pieces.append(piece)
                empty = 0
            elif (empty := empty + 1) > self._epoch:
                raise DataError("no document of this shard has a token")
            if not missing:
                break
            document, offset = self._following(document), 0
        # The last token was a target only: it is the first input of the next row.
        self._document, self._offset = document, offset + len(piece) - 1
        joined = join(pieces, count * self._length + 1, pad=0)
        return rows(*(windows(stream, self._length) for stream in joined))

    def _tokens(self, document: int) -> np.ndarray:
        if self._held is None or self._held[0] != document:
            self._held = (document, self._draw(document))
        return self._held[1]


class InterleavedRows:
    """Rows in turn from several documents read side by side, so that neighbouring rows differ.

    A stream that ends its document continues with the first one that no stream has begun: every document is
    read once an epoch, in one stream. Arguments as for `RowStream`; `streams` is how many there are.
    """

    def __init__(self, document: Callable[[int], np.ndarray], epoch: int, length: int, streams: int) -> None:
        self._turn = 0
        self._next = streams
        self._streams = [RowStream(document, epoch, length, i, self._begin) for i in range(streams)]

    @property
    def position(self) -> list:
        """JSON values: the stream of the next row, the next document to begin, each stream's position."""
        return [self._turn, self._next, *(list(stream.position) for stream in self._streams)]

    @position.setter
    def position(self, position: list) -> None:
        self._turn, self._next, *places = position
        for stream, (document, offset) in zip(self._streams, places, strict=True):
            stream.position = (document, offset)

    def _begin(self, ended: int) -> int:
        del ended
        self._next += 1
        return self._next - 1

    def take(self, count: int) -> Batch:
        """The next `count` rows, each array (count, L) int32."""
        turns = (self._turn + np.arange(count)) % len(self._streams)
        self._turn = int((self._turn + count) % len(self._streams))
        batch: Batch = {}
        for i in np.unique(turns):  # not all streams, of which there may be many more than rows
            places = np.flatnonzero(turns == i)
            for name, part in self._streams[i].take(len(places)).items():
                batch.setdefault(name, np.empty((count, *part.shape[1:]), part.dtype))[places] = part
        return batch


_HELD_OUT_SEED = 0
HELD_OUT_POOL = 4_194_304  # tokens of the eval split that held-out rows are picked from


def make_text_batches(config: DataConfig, tokenizer: Tokenizer, selection: Selection) -> Batches:
    """The endless training batches of the selected shards, with the arrays (B, L) of `rows`.

    Raises:
      DataError: the data set cannot be opened, or has fewer documents than shards.
    """
    source = open_tokens(config, tokenizer, config.train_split)

    def packed(document: Callable[[int], np.ndarray], shard: int) -> InterleavedRows:
        streams = min(config.interleave, epoch_size(len(source), shard, selection.num_shards))
        return InterleavedRows(document, len(source), config.sequence_length, streams)

    identity = {
        "data_set": source.full_name,
        "text_feature": config.text_feature,
        "tokenizer": tokenizer.fingerprint,
        "interleave": config.interleave,
    }
    return make_batches(config, source, selection, lambda order, *_: order, packed, identity)


def held_out_text(config: DataConfig, tokenizer: Tokenizer, batch_size: int, num_batches: int) -> list[Batch]:
    """The held-out batches, the same for every learner: rows evenly spaced over the packed eval split.

    Only the first `HELD_OUT_POOL` tokens of a large split are read, its documents shuffled by a fixed seed.
    A split with fewer rows gives fewer batches, the last one padded; no token is scored twice.

    Raises:
      DataError: the split cannot be opened or has nothing to score.
    """
    source = open_tokens(config, tokenizer, config.eval_split)
    documents = grain.MapDataset.source(source).shuffle(seed=_HELD_OUT_SEED)
    pieces, pooled = [], 0
    for index in range(len(documents)):
        piece = documents[index]
        if len(piece):
            pieces.append(piece)
            pooled += len(piece)
        if pooled >= HELD_OUT_POOL:
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
        problem = f"{config.name} has nothing to score in split {config.eval_split}"
        raise DataError(f"config.data.eval_split: {problem}")
    return [
        {name: array[start : start + batch_size] for name, array in packed.items()}
        for start in range(0, wanted, batch_size)
    ]
