"""Batches of text: documents as tokens, packed into rows."""

from __future__ import annotations

from collections.abc import Callable

import grain
import numpy as np

from ddiloco.data.batches import Batch, Batches, Selection, make_batches
from ddiloco.data.errors import DataError
from ddiloco.data.packing import InterleavedRows, join, rows, windows
from ddiloco.data.settings import DataConfig
from ddiloco.data.shards import epoch_size
from ddiloco.data.tokenized import open_tokens
from ddiloco.data.tokenizers import Tokenizer

_HELD_OUT_SEED = 0


def make_text_batches(config: DataConfig, tokenizer: Tokenizer, selection: Selection) -> Batches:
    """The endless training batches of the selected shards, with the arrays (B, L) of `packing.rows`.

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

    Only the first `held_out_pool` tokens of a large split are read, its documents shuffled by a fixed seed.
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
        told = f"{config.name} has nothing to score in split {config.eval_split}"
        raise DataError(f"config.data.eval_split: {told}")
    return [
        {name: array[start : start + batch_size] for name, array in packed.items()}
        for start in range(0, wanted, batch_size)
    ]
