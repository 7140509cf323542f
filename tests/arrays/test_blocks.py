"""Arrays of which each process has some blocks."""

import itertools
import math
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.arrays.blocks import (
    Blocks,
    Cut,
    Gathered,
    box_of,
    box_shape,
    held,
    needed,
    owned,
    placed,
    slices,
    tiled,
)


@st.composite
def grids(draw):
    """A shape, and the boxes of a grid over it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))
    axes = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else ()
        ends = [0, *sorted(inner), size]
        axes.append(list(itertools.pairwise(ends)))
    return tuple(shape), [tuple(box) for box in itertools.product(*axes)]


@given(grids(), st.data())
def test_boxes_of_a_grid_are_a_tiling_however_they_are_shared_and_fewer_or_more_are_none(grid, data):
    shape, boxes = grid
    hosts = data.draw(st.integers(1, 4))
    owner = [data.draw(st.integers(0, hosts - 1)) for _ in boxes]
    cuts = [Cut(shape, tuple(b for b, o in zip(boxes, owner, strict=True) if o == h)) for h in range(hosts)]
    assert tiled(cuts)
    assert sum(cut.size for cut in cuts) == math.prod(shape)
    some = data.draw(st.integers(0, len(boxes) - 1))
    assert not tiled([*cuts, Cut(shape, (boxes[some],))])
    assert not tiled([Cut(shape, tuple(b for b in cut.boxes if b != boxes[some])) for cut in cuts])


@given(grids(), st.data())
def test_the_blocks_of_an_array_give_any_part_of_one_of_them(grid, data):
    shape, boxes = grid
    array = np.arange(math.prod(shape)).reshape(shape)
    cut = Cut(shape, tuple(boxes))
    blocks = Blocks(shape, dict(zip(boxes, cut.of(array.reshape(-1)), strict=True)))
    box = data.draw(st.sampled_from(boxes))
    inside = []
    for start, stop in box:
        first = data.draw(st.integers(start, stop - 1))
        inside.append(slice(first, data.draw(st.integers(first + 1, stop))))
    np.testing.assert_array_equal(blocks[tuple(inside)], array[tuple(inside)])
    assert blocks.cut == cut


@given(grids(), st.data())
def test_blocks_are_gathered_from_any_hosts_and_what_is_missing_or_comes_twice_is_seen(grid, data):
    shape, boxes = grid
    array = np.arange(math.prod(shape)).reshape(shape)
    whole = Blocks(shape, dict(zip(boxes, Cut(shape, tuple(boxes)).of(array), strict=True)))
    wanted = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        wanted.append((first, data.draw(st.integers(first + 1, size))))
    cut, senders = Cut(shape, (tuple(wanted),)), [Blocks(shape, {b: x}) for b, x in whole.blocks.items()]
    data.draw(st.randoms()).shuffle(senders)
    gathered, twice, less = (Gathered(cut, array.dtype) for _ in range(3))
    for sender in senders:
        gathered.add(sender)
        twice.add(sender)
        if sender.within(cut).blocks:
            missing = sender
    np.testing.assert_array_equal(gathered.blocks().all, array[slices(tuple(wanted))])
    twice.add(missing)
    for sender in senders:
        if sender is not missing:
            less.add(sender)
    for one in (twice, less):
        with pytest.raises(ValueError, match="missing, or came twice"):
            one.blocks()


def test_blocks_beyond_the_array_are_refused():
    for box in (((0, 5),), ((-1, 2),), ((3, 1),)):
        with pytest.raises(ValueError, match="not in an array"):
            Cut((4,), (box,)).check()


def test_an_array_without_elements_needs_no_blocks():
    assert tiled([Cut((0, 4), ())])
    assert tiled([Cut((0, 4), (((0, 0), (0, 4)),))])
    assert not tiled([Cut((), ())])


@pytest.mark.parametrize("spec", [(), ("data",), (None, "fsdp"), ("fsdp", "data"), (("data", "fsdp"),)])
def test_what_a_process_owns_holds_and_needs_follows_from_the_sharding(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    sharding, whole = NamedSharding(mesh, PartitionSpec(*spec)), np.arange(64.0).reshape(8, 8)
    array = jax.device_put(whole, sharding)
    one_of_several = types.SimpleNamespace(
        shape=(8, 8), is_fully_addressable=False, addressable_shards=array.addressable_shards
    )
    assert tiled([owned(one_of_several).cut])  # replicas are no second time in it
    assert owned(array).cut == Cut.whole((8, 8))
    assert set(held(array).blocks) == set(needed(sharding, (8, 8)).boxes)
    for box, block in held(array).blocks.items():
        np.testing.assert_array_equal(block, whole[slices(box)])
        assert block.shape == box_shape(box) and box_of(slices(box), (8, 8)) == box
    fetched = {box_of(shard.index, (8, 8)): shard.data for shard in reversed(array.addressable_shards)}
    for box, block in held(array).blocks.items():  # no other of the same, which would be fetched once more
        assert np.shares_memory(block, np.asarray(fetched[box]))
    [again] = placed([whole], [sharding])
    assert again.sharding == sharding
