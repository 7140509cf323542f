"""The correspondence between our tensors and theirs, in both directions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Theirs(NamedTuple):
    """A tensor of theirs: its shape, and how it is made from one of ours; where there is none, it is zero."""

    shape: Shape
    ours: str | None = None
    make: Callable[[np.ndarray], np.ndarray] = np.asarray


class Ours(NamedTuple):
    """The construction of one of our tensors from some of theirs."""

    theirs: tuple[str, ...]
    make: Callable[..., np.ndarray]


class Table:
    """Every tensor of a model by its name, ours by layer; the functions take and give float32 arrays.

    Attributes:
      theirs: what a file of theirs has.
      ours: every parameter of ours.
      ignored: tensors that a file of theirs may have beside, which change no logits.
      copies: tensors that a file of theirs may have once more, by the name of the copy.
    """

    def __init__(self, shapes: Mapping[str, Shape], ignored: Sequence[str] = ()) -> None:
        """`shapes`: of all parameters of ours, by layer."""
        self.theirs: dict[str, Theirs] = {}
        self.ours: dict[str, Ours] = {}
        self.ignored = frozenset(ignored)
        self.copies: dict[str, str] = {}
        self._shapes = shapes

    def shape(self, ours: str) -> Shape:
        """Shape of one of our parameters."""
        return self._shapes[ours]

    def same(self, ours: str, theirs: str, shape: Shape | None = None, gain: float = 1.0) -> None:
        """The same numbers, in this shape if it is another, and theirs `gain` times as large."""
        their_shape = shape or self.shape(ours)
        self.theirs[theirs] = Theirs(their_shape, ours, lambda x: _times(x, gain).reshape(their_shape))
        self.ours[ours] = Ours((theirs,), lambda x: _times(x, 1 / gain).reshape(self.shape(ours)))

    def linear(self, ours: str, theirs: str, outputs: int = 1) -> None:
        """A kernel (inputs, outputs), its last `outputs` axes those of the output; theirs is (out, in)."""
        shape = self.shape(ours)
        flat = math.prod(shape[:-outputs]), math.prod(shape[-outputs:])
        self.theirs[theirs] = Theirs(flat[::-1], ours, lambda x: x.reshape(flat).T)
        self.ours[ours] = Ours((theirs,), lambda x: x.T.reshape(shape))

    def linears(self, ours: str, theirs: Sequence[str]) -> None:
        """Kernels (inputs, outputs) in the rows of one tensor of ours; theirs are (out, in), one by one."""
        _, inputs, outputs = self.shape(ours)
        for row, name in enumerate(theirs):
            self.theirs[name] = Theirs((outputs, inputs), ours, functools.partial(_kernel, row))
        self.ours[ours] = Ours(tuple(theirs), lambda *rows: np.stack([row.T for row in rows]))

    def zero(self, theirs: str, shape: Shape) -> None:
        """A tensor of theirs that changes no logits, which we do not have."""
        self.theirs[theirs] = Theirs(shape)


def _kernel(row: int, x: np.ndarray) -> np.ndarray:
    return x[row].T


def _times(x: np.ndarray, gain: float) -> np.ndarray:
    return x if gain == 1.0 else x * np.float32(gain)
