"""Fragments: which rows of which tensors are synchronised together (paper, "Fragments").

A fragment consists of pieces, each a whole tensor or a range of its rows. The layout depends on names,
shapes, P and the strategy only, so that every role computes the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

BYTES_PER_ELEMENT = 4  # masters are float32
SHARED_ROWS = 128  # rows of a vocabulary that stay together, so that devices can divide a piece of it
BALANCE_BOUND = 4 / 3  # of the largest fragment over the mean; the paper's promise for balanced fragments

_LAYER = re.compile(r"(?:(.*)/)?layers/(\d+)(?:/|$)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a tensor along its first axis; the whole tensor if both are None."""

    name: str
    start: int | None = None
    stop: int | None = None

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.start is None

    def shape(self, tensor: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this piece of a tensor of the given shape."""
        if self.start is None or self.stop is None:
            return tensor
        return self.stop - self.start, *tensor[1:]


@dataclasses.dataclass(frozen=True)
class FragmentLayout:
    """P fragments that together hold every element of every tensor exactly once."""

    strategy: str  # the name of the strategy by which it was made
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape) of every tensor, sorted by name
    fragments: tuple[tuple[Piece, ...], ...]  # the pieces of each fragment, sorted by name and row

    @property
    def num_fragments(self) -> int:
        """P, the number of fragments."""
        return len(self.fragments)

    @functools.cached_property
    def bytes(self) -> tuple[int, ...]:
        """Bytes of each fragment in float32."""
        return tuple(
            sum(BYTES_PER_ELEMENT * math.prod(shape) for shape in self.piece_shapes(p))
            for p in range(self.num_fragments)
        )

    @property
    def balance(self) -> float:
        """Bytes of the largest fragment over the mean; 1 is perfect."""
        return max(self.bytes) * self.num_fragments / max(1, sum(self.bytes))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of names, shapes, pieces and strategy: a learner's must equal the syncer's."""
        content = {
            "strategy": self.strategy,
            "shapes": self.shapes,
            "fragments": [[dataclasses.astuple(piece) for piece in pieces] for pieces in self.fragments],
        }
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def names(self, p: int) -> tuple[str, ...]:
        """The tensors that fragment p holds in whole or in part, sorted."""
        return tuple(dict.fromkeys(piece.name for piece in self.fragments[p]))

    def piece_shapes(self, p: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each piece of fragment p."""
        return tuple(piece.shape(self._shape_of[piece.name]) for piece in self.fragments[p])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._shape_of[name]

    @functools.cached_property
    def _shape_of(self) -> dict[str, tuple[int, ...]]:
        return dict(self.shapes)


def leaf_names(tree: Any) -> list[str]:
    """The names of a tree's leaves, in their order: their paths; those of NNX variables without `value`.

    Example:
      >>> leaf_names({"out": {"w": 0, "b": 1}, "layers": [2]}), leaf_names(3)
      (['layers/0', 'out/b', 'out/w'], ['params'])
    """
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path in paths]
    if all(name.endswith("/value") for name in names):
        names = [name.removesuffix("/value") for name in names]
    return names


def is_embedding(name: str) -> bool:
    """Whether a tensor belongs to the embedding or the head, which are merged by direct averaging."""
    return name.startswith(("embed", "head"))


def kind_of(name: str) -> str:
    """The kind of a tensor: its name without numbers, as of layers, and without its last part.

    Example:
      >>> kind_of("layers/3/mlp/up/kernel"), kind_of("table")
      ('layers/mlp/up', 'table')
    """
    parts = [part for part in name.split("/") if not part.isdigit()]
    return "/".join(parts[:-1] or parts)


def fragment(
    shapes: Mapping[str, tuple[int, ...]],
    num_fragments: int,
    strategy: str = "balanced",
    *,
    split_large: bool = True,
) -> FragmentLayout:
    """Divides tensors into P fragments, none of them empty.

    Args:
      shapes: shape of each tensor, by name.
      num_fragments: P, at least 1.
      strategy: `layer`, contiguous groups of layers in network order; `tensor`, round robin in the order of
        names; `balanced`, largest tensor first, each into the fragment with the fewest bytes.
      split_large: whether tensors larger than total/P are first cut into near-equal ranges of rows.
        `balanced` cuts finer, down to a third of that, where the largest fragment would otherwise
        exceed 4/3 of the mean.

    Raises:
      ValueError: more fragments than pieces.

    Example:
      >>> layout = fragment({"embed": (8, 4), "layers/0/up": (4, 4), "layers/1/up": (4, 4)}, 2)
      >>> for pieces in layout.fragments:
      ...     print(*(piece.name for piece in pieces))
      embed
      layers/0/up layers/1/up
      >>> layout.bytes, layout.balance
      ((128, 128), 1.0)
    """
    tensors = tuple(sorted((name, tuple(int(n) for n in shape)) for name, shape in shapes.items()))
    share = sum(_size(shape) for _, shape in tensors) / num_fragments
    # Pieces of at most a third of the mean always pack within 4/3 of it: a fragment is at most at the
    # mean when it gets its last piece.
    cuts = (1, 2, 3) if split_large and strategy == "balanced" else (1,)
    layouts: list[FragmentLayout] = []
    for cut in cuts:
        pieces = list(_cut(tensors, share / cut if split_large else math.inf))
        if len(pieces) < num_fragments:
            raise ValueError(
                f"num_fragments is {num_fragments}, but there are only {len(pieces)} pieces to put into them"
            )
        bins = STRATEGIES[strategy](pieces, num_fragments)
        fragments = tuple(tuple(sorted((p for p, _ in bin_), key=_row_order)) for bin_ in bins)
        layouts.append(FragmentLayout(strategy, tensors, fragments))
        if layouts[-1].balance <= BALANCE_BOUND:
            break
    return min(layouts, key=lambda layout: layout.balance)


def take(layout: FragmentLayout, p: int, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The pieces of fragment p out of a dict of tensors, numpy or jax, also under jit.

    `params` needs only the tensors `layout.names(p)`. Pieces of numpy arrays are views.

    Example:
      >>> import numpy as np
      >>> layout = fragment({"a": (2, 3), "b": (3,)}, 2, split_large=False)
      >>> take(layout, 1, {"a": np.zeros((2, 3)), "b": np.ones(3)})
      (array([1., 1., 1.]),)
    """
    return tuple(
        params[piece.name] if piece.whole else params[piece.name][piece.start : piece.stop]
        for piece in layout.fragments[p]
    )


def put(layout: FragmentLayout, p: int, params: Mapping[str, Any], pieces: Sequence[Any]) -> dict[str, Any]:
    """The tensors with these pieces in the place of fragment p's; of jax arrays, under jit."""
    result = dict(params)
    for piece, value in zip(layout.fragments[p], pieces, strict=True):
        if piece.whole:
            result[piece.name] = value
        else:
            result[piece.name] = result[piece.name].at[piece.start : piece.stop].set(value)
    return result


def assemble(layout: FragmentLayout, fragments: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """All tensors by name, sorted, from the pieces of all fragments; whole tensors are not copied.

    Example:
      >>> import numpy as np
      >>> layout = fragment({"a": (4,)}, 2)
      >>> assemble(layout, [[np.array([1, 2])], [np.array([3, 4])]])
      {'a': array([1, 2, 3, 4])}
    """
    whole: dict[str, np.ndarray] = {}
    for names, pieces in zip(layout.fragments, fragments, strict=True):
        for piece, value in zip(names, pieces, strict=True):
            if piece.whole:
                whole[piece.name] = value
            else:
                shape = layout.shape(piece.name)
                whole.setdefault(piece.name, np.empty(shape, value.dtype))[piece.start : piece.stop] = value
    return {name: whole[name] for name, _ in layout.shapes}


def zeros(layout: FragmentLayout) -> dict[str, np.ndarray]:
    """All tensors by name, as read-only placeholders without memory of their own."""
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in layout.shapes}


_Sized = tuple[Piece, int]


def _size(shape: tuple[int, ...]) -> int:
    return BYTES_PER_ELEMENT * math.prod(shape)


def _row_order(piece: Piece) -> tuple[str, int]:
    return piece.name, piece.start or 0


def _cut(tensors: Sequence[tuple[str, tuple[int, ...]]], limit: float) -> list[_Sized]:
    """Pieces of about `limit` bytes at most, as far as rows allow it, in the order of names and rows."""
    pieces: list[_Sized] = []
    for name, shape in tensors:
        size = _size(shape)
        rows = shape[0] if shape else 1
        if size <= limit or rows <= 1:
            pieces.append((Piece(name), size))
            continue
        row = size // rows
        count = -(-rows // max(1, int(limit // row)))
        unit = math.gcd(rows, SHARED_ROWS) if rows >= 16 * count * SHARED_ROWS else 1
        edges = [rows // unit * i // count * unit for i in range(count + 1)]
        pieces.extend((Piece(name, a, b), (b - a) * row) for a, b in itertools.pairwise(edges))
    return pieces


def _pack(pieces: Sequence[_Sized], num_fragments: int) -> list[list[_Sized]]:
    """Largest first into the lightest fragment; ties by name and row, then by fragment number."""
    bins: list[list[_Sized]] = [[] for _ in range(num_fragments)]
    # The count of pieces breaks ties, so that tensors without elements do not all go into one fragment.
    lightest = [(0, 0, p) for p in range(num_fragments)]
    for sized in sorted(pieces, key=lambda sized: (-sized[1], *_row_order(sized[0]))):
        load, count, p = heapq.heappop(lightest)
        bins[p].append(sized)
        heapq.heappush(lightest, (load + sized[1], count + 1, p))
    return bins


def _group_layers(pieces: Sequence[_Sized], num_fragments: int) -> list[list[_Sized]]:
    """Contiguous groups in network order, cut between layers where there are enough of them."""
    ordered = sorted(pieces, key=lambda sized: (*_network_order(sized[0]), *_row_order(sized[0])))
    units: list[list[_Sized]] = []
    for _, layer in itertools.groupby(ordered, key=lambda sized: _network_order(sized[0])):
        whole = []
        for sized in layer:
            if sized[0].whole:
                whole.append(sized)
            else:
                units.append([sized])
        if whole:
            units.append(whole)
    if len(units) < num_fragments:
        units = [[sized] for sized in ordered]
    return _partition(units, num_fragments)


def _network_order(piece: Piece) -> tuple[int, int, str, int]:
    match = _LAYER.match(piece.name)
    if match:
        inner = match.group(1) or ""
        return 1, 0 if inner else 1, inner, int(match.group(2))  # an encoder's layers before the trunk's
    stage = 0 if piece.name.startswith("embed") else 3 if piece.name.startswith("head") else 2
    return stage, 0, "", 0


def _partition(units: Sequence[list[_Sized]], num_groups: int) -> list[list[_Sized]]:
    """Contiguous groups of units, none empty, whose largest is as small as possible."""
    sizes = [sum(size for _, size in unit) for unit in units]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle, 1)) <= num_groups:
            high = middle
        else:
            low = middle + 1
    edges = [*_fill(sizes, low, num_groups), len(units)]
    return [list(itertools.chain(*units[a:b])) for a, b in itertools.pairwise(edges)]


def _fill(sizes: Sequence[int], capacity: int, at_least: int) -> list[int]:
    """Where each group begins if groups are filled up to `capacity` and there must be `at_least` of them."""
    begins, load = [0], sizes[0]
    for i, size in enumerate(sizes[1:], start=1):
        must_open = len(sizes) - i <= at_least - len(begins)
        if load + size > capacity or must_open:
            begins.append(i)
            load = 0
        load += size
    return begins


STRATEGIES: dict[str, Callable[[Sequence[_Sized], int], list[list[_Sized]]]] = {
    "layer": _group_layers,
    "tensor": lambda pieces, count: [list(pieces[p::count]) for p in range(count)],
    "balanced": _pack,
}
