"""Arrays of which a process has only some blocks, since a learner's mesh spans several hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ddiloco.arrays.host_memory import aligned_empty

Box = tuple[tuple[int, int], ...]
"""(start, stop) of a block along each axis."""


class Cut(NamedTuple):
    """Disjoint blocks of an array, by their boxes."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Cut:
        """The array as one block."""
        return cls(tuple(shape), (tuple((0, size) for size in shape),))

    @property
    def size(self) -> int:
        """Elements of all blocks."""
        return sum(math.prod(box_shape(box)) for box in self.boxes)

    def of(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The blocks of an array, which is reshaped to `shape`; views where that is possible."""
        shaped = array.reshape(self.shape)
        return tuple(shaped[slices(box)] for box in self.boxes)

    def check(self) -> None:
        """Raises ValueError if a block is not within the array."""
        for box in self.boxes:
            ends = zip(box, self.shape, strict=True)
            if not all(0 <= start <= stop <= size for (start, stop), size in ends):
                raise ValueError(f"the block {box} is not in an array of shape {self.shape}")


class Blocks:
    """The blocks of an array that one process has; can be indexed within any one of them.

    Example:
      >>> halves = Blocks((4, 2), {((0, 2), (0, 2)): np.zeros((2, 2)), ((2, 4), (0, 2)): np.ones((2, 2))})
      >>> print(halves[3:4, 0:1])
      [[1.]]
    """

    def __init__(self, shape: Sequence[int], blocks: Mapping[Box, np.ndarray]) -> None:
        self.shape = tuple(shape)
        self.blocks = dict(blocks)

    @classmethod
    def whole(cls, array: np.ndarray) -> Blocks:
        """The array as its only block."""
        return cls(array.shape, {Cut.whole(array.shape).boxes[0]: array})

    @property
    def all(self) -> np.ndarray:
        """The array, if it is one block."""
        [block] = self.blocks.values()
        return block

    @property
    def cut(self) -> Cut:
        """The boxes of these blocks."""
        return Cut(self.shape, tuple(self.blocks))

    def __getitem__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Part of one block; raises KeyError if no block contains it."""
        assert index is not None, "as shardings give it, where this process has a part"
        wanted = box_of(index, self.shape)
        if wanted in self.blocks:
            return self.blocks[wanted]
        for box, block in self.blocks.items():
            if all(a <= start and stop <= b for (start, stop), (a, b) in zip(wanted, box, strict=True)):
                inside = [
                    slice(start - a, stop - a) for (start, stop), (a, _) in zip(wanted, box, strict=True)
                ]
                return block[tuple(inside)]
        raise KeyError(f"no block has {wanted}")

    def within(self, cut: Cut) -> Blocks:
        """The parts of these blocks inside a cut."""
        found = {}
        for box, block in self.blocks.items():
            for wanted in cut.boxes:
                if (common := overlap(box, wanted)) is not None:
                    found[common] = block[slices(moved(common, box)) or ...]
        return Blocks(self.shape, found)

    def map(self, change: Callable[[Box, np.ndarray], np.ndarray]) -> Blocks:
        """The same blocks after `change` of (box, block)."""
        return Blocks(self.shape, {box: change(box, block) for box, block in self.blocks.items()})


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that an index of slices selects, as shardings give them."""
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the block."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """The index that selects the box."""
    return tuple(slice(start, stop) for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None: empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def moved(box: Box, origin: Box) -> Box:
    """The box relative to the start of `origin`, a box that contains it."""
    return tuple((start - a, stop - a) for (start, stop), (a, _) in zip(box, origin, strict=True))


class Gathered:
    """Assembles blocks of an array from the blocks that several senders have.

    Example:
      >>> gathered = Gathered(Cut((4,), (((1, 4),),)), np.dtype(int))
      >>> gathered.add(Blocks((4,), {((0, 3),): np.array([0, 1, 2])}))
      >>> gathered.add(Blocks((4,), {((3, 4),): np.array([3])}))
      >>> gathered.blocks().blocks
      {((1, 4),): array([1, 2, 3])}
    """

    def __init__(self, cut: Cut, dtype: np.dtype) -> None:
        self._cut, self._dtype = cut, dtype
        self._found: dict[Box, np.ndarray] = {}
        self._parts: dict[Box, list[Box]] = {box: [] for box in cut.boxes}

    def add(self, blocks: Blocks) -> None:
        """Copies the wanted parts of these; a block that equals a wanted one is kept without a copy.

        Raises:
          ValueError: these blocks are of an array of another shape.
        """
        if blocks.shape != self._cut.shape:
            raise ValueError(f"blocks of an array of shape {blocks.shape}, not {self._cut.shape}")
        for wanted, parts in self._parts.items():
            for part, block in blocks.within(Cut(self._cut.shape, (wanted,))).blocks.items():
                parts.append(moved(part, wanted))
                if part == wanted:
                    self._found[wanted] = block
                else:
                    self._room(wanted)[slices(parts[-1])] = block

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, and nothing came twice."""
        return all(self._tiled(wanted) for wanted in self._parts)

    def blocks(self) -> Blocks:
        """The assembled blocks; raises ValueError if a part is missing or came twice."""
        for wanted in self._parts:
            if not self._tiled(wanted):
                raise ValueError(f"parts of the block {wanted} are missing, or came twice")
        return Blocks(self._cut.shape, {box: self._room(box) for box in self._cut.boxes})

    def _tiled(self, wanted: Box) -> bool:
        return tiled([Cut(box_shape(wanted), tuple(self._parts[wanted]))])

    def _room(self, wanted: Box) -> np.ndarray:
        if wanted not in self._found:
            self._found[wanted] = aligned_empty(box_shape(wanted), self._dtype)
        return self._found[wanted]


def owned(array: np.ndarray | jax.Array | Blocks) -> Blocks:
    """The blocks whose first replica this process has, copied to host memory; waits for the copies."""
    if isinstance(array, Blocks):
        return array
    if isinstance(array, np.ndarray | np.generic) or array.is_fully_addressable:
        return Blocks.whole(np.asarray(array))
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return Blocks(array.shape, {box_of(s.index, array.shape): np.asarray(s.data) for s in shards})


def held(array: jax.Array) -> Blocks:
    """All blocks that this process's devices have, copied to host memory; waits for the copies."""
    # Of replicas the first, which is the one that `copy_to_host_async` copies.
    shards = {box_of(shard.index, array.shape): shard for shard in reversed(array.addressable_shards)}
    return Blocks(array.shape, {box: np.asarray(shard.data) for box, shard in shards.items()})


def in_host_memory(array: jax.Array, blocks: Callable[[jax.Array], Blocks] = held) -> np.ndarray | Blocks:
    """The array in host memory; if it spans several processes, only `blocks` of it."""
    return np.asarray(array) if array.is_fully_addressable else blocks(array)


def needed(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Cut:
    """The blocks that this process's devices hold of an array."""
    found = sharding.addressable_devices_indices_map(shape).values()
    return Cut(shape, tuple(dict.fromkeys(box_of(index, shape) for index in found if index is not None)))


def placed(
    values: Sequence[np.ndarray | Blocks | jax.Array], shardings: Sequence[jax.sharding.Sharding]
) -> tuple[jax.Array, ...]:
    """Puts the values on the devices; of each, a process needs only the part that its own devices hold."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        arrays: tuple[jax.Array, ...] = jax.device_put(tuple(values), tuple(shardings))
        return arrays
    return tuple(
        value
        if isinstance(value, jax.Array)
        else jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for value, sharding in zip(values, shardings, strict=True)
    )


def tiled(cuts: Sequence[Cut]) -> bool:
    """Whether the blocks cover the array, each element once, and form a grid.

    >>> left, right = Cut((2, 4), (((0, 2), (0, 1)),)), Cut((2, 4), (((0, 2), (1, 4)),))
    >>> tiled([left, right]), tiled([left, left]), tiled([left])
    (True, False, False)
    """
    shape = cuts[0].shape
    boxes = [box for cut in cuts for box in cut.boxes]
    if any(cut.shape != shape for cut in cuts) or len(set(boxes)) != len(boxes):
        return False
    if not boxes:
        return math.prod(shape) == 0
    grid = [sorted({box[axis] for box in boxes}) for axis in range(len(shape))]
    whole = all(
        [start for start, _ in bounds] + [size] == [0, *(stop for _, stop in bounds)]
        for bounds, size in zip(grid, shape, strict=True)
    )
    return whole and len(boxes) == math.prod(len(bounds) for bounds in grid)
