"""A learner's hosts read their rows of the batches that one host would read."""

import json

import numpy as np
import pytest

from ddiloco.data.batches import Selection
from ddiloco.data.errors import DataError
from ddiloco.data.host_batches import HostBatches
from ddiloco.data.text import make_text_batches
from ddiloco.data.tokenizers import ByteTokenizer

ROWS, PARTS = 8, 4
SHARDS = tuple(range(PARTS, 2 * PARTS))  # of learner 1 of 2


def whole(config):
    return make_text_batches(config, ByteTokenizer(), Selection(SHARDS, 2 * PARTS, ROWS, 7))


def host(config, own):
    read = make_text_batches(config, ByteTokenizer(), Selection(own, 2 * PARTS, ROWS // PARTS * len(own), 7))
    return HostBatches(read, own, SHARDS, ROWS)


def rows_of(batch, name, rows):
    blocks = batch.rows[name]
    return blocks[(slice(*rows), *[slice(0, size) for size in blocks.shape[1:]])]


@pytest.mark.parametrize("split", [((4, 7), (5, 6)), ((4,), (5,), (6,), (7,))])
def test_the_hosts_rows_are_those_of_one_and_so_is_their_position_when_their_number_changes(config, split):
    alone, hosts = whole(config), [host(config, own) for own in split]
    for _ in range(5):
        batch, parts = next(alone), [next(one) for one in hosts]
        counted = {shard: count for part in parts for shard, count in part.tokens.items()}
        assert sum(counted.values()) == batch["weights"].sum()
        for own, part in zip(split, parts, strict=True):
            for shard in own:
                first = (shard - PARTS) * ROWS // PARTS
                rows = (first, first + ROWS // PARTS)
                for name, array in batch.items():
                    np.testing.assert_array_equal(rows_of(part, name, rows), array[slice(*rows)])
    position = HostBatches.joined([one.get_state() for one in hosts])
    assert json.loads(json.dumps(position)) == json.loads(json.dumps(alone.get_state()))
    pair = [host(config, (4, 5)), host(config, (6, 7))]
    for one in pair:
        one.set_state(position)
    following, parts = next(alone), [next(one) for one in pair]
    for half, part in enumerate(parts):
        rows = (half * ROWS // 2, (half + 1) * ROWS // 2)
        np.testing.assert_array_equal(rows_of(part, "inputs", rows), following["inputs"][slice(*rows)])


def test_a_position_without_what_a_host_reads_is_refused(config):
    one = host(config, (4, 5))
    state = one.get_state()
    with pytest.raises(DataError, match="shards were"):
        host(config, (6, 7)).set_state(state)
