"""A learner beyond the first ones reads another's shard from the end, and nothing twice until they meet."""

import collections
import json

import pytest

from ddiloco.data.batches import Selection
from ddiloco.data.errors import DataError
from ddiloco.data.images import make_image_batches
from ddiloco.data.settings import ClassificationConfig
from ddiloco.data.shards import beside, reshard

RECORDS, SHARDS = 101, 2
FIRST = 51  # records of shard 0


@pytest.fixture
def of(data_dir):
    config = ClassificationConfig(data_dir=data_dir, crop="none", padding=0, train_split=f"train[:{RECORDS}]")

    def make(shard, num_shards=SHARDS, state=None):
        batches = make_image_batches(config, 8, 1, 10, Selection((shard,), num_shards, 1, seed=3))
        if state is not None:
            batches.set_state(json.loads(json.dumps(state)))
        return batches

    return make


def drawn(batches, count):
    return [next(batches)["image"].tobytes() for _ in range(count)]


@pytest.mark.parametrize("before", [0, 20, 51, 130])
def test_the_two_read_an_epoch_once_between_them(of, before):
    first = of(0)
    epoch = max(before - 1, 0) // FIRST
    begun = drawn(first, before)[epoch * FIRST :]
    second = of(SHARDS, state=beside(first.get_state()))
    left = (epoch + 1) * FIRST - before
    both = [*begun, *drawn(first, left // 2), *drawn(second, left - left // 2)]
    assert len(both) == len(set(both)) == FIRST
    assert set(both) == set(drawn(of(0), FIRST))
    further = drawn(second, left // 2 + len(begun)), drawn(second, FIRST)  # on to its own end of the epoch
    assert set(further[1]) == set(both)
    # and the next one from its end, in an order of its own
    assert further[1] == drawn(of(0, state=first.get_state()), FIRST + left - left // 2)[-FIRST:][::-1]


def test_a_second_reader_goes_on_where_it_was(of):
    first, second = of(1), of(1 + SHARDS, state=beside(of(1).get_state()))
    drawn(first, 3)
    seen = drawn(second, 70)
    again = of(1 + SHARDS, state=beside(of(1).get_state()))
    assert drawn(again, 30) == seen[:30]
    state = again.get_state()
    assert (state["batches"], list(state["shards"])) == (30, ["3"])
    assert drawn(of(3, state=state), 40) == seen[30:]
    kept = reshard([first.get_state(), state], SHARDS, [(0,), (1,), (2,), (3,)])
    assert kept[3] == state and kept[2] is None


@pytest.mark.parametrize("counts", [(0, 0), (5, 9), (50, 51), (60, 3)])
def test_what_neither_has_read_is_dealt_anew(of, counts):
    """Nothing is lost or read twice where they have not met; what both have read counts as read."""
    first, other = of(0), of(1)
    second = of(SHARDS, state=beside(first.get_state()))
    readers = zip((first, second, other), (*counts, 10), strict=True)
    seen = collections.Counter(image for batches, count in readers for image in drawn(batches, count))
    states = [batches.get_state() for batches in (first, second, other)]
    for shard, state in enumerate(reshard(states, 3)):
        [position] = state["shards"].values()
        left = sum(stop - start for _, _, start, stop, _ in position["left"])
        seen.update(drawn(of(shard, 3, state), left))
    epoch = set(drawn(of(0), FIRST)) | set(drawn(of(1), RECORDS - FIRST))
    assert set(seen) == epoch
    if counts[0] <= FIRST and sum(counts) <= FIRST:
        assert set(seen.values()) == {1}


@pytest.mark.parametrize(
    "state", [{}, {"stream": {}}, {"stream": {"num_shards": 2, "records": 9}, "shards": 4}]
)
def test_a_position_that_cannot_be_read_is_told(state):
    with pytest.raises(DataError, match="cannot be read"):
        beside(state)
