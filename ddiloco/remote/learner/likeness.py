"""Plausibility of a peer's inner state, which may be malicious."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.arrays.blocks import Blocks
from ddiloco.workers.exchange import InnerState

MEANINGFUL_STEPS = 100  # steps in a state before others are compared with it
_FACTOR = 30.0  # between the root mean squares of one leaf in two honest states
_COUNT_FACTOR = 1000.0  # the same of whole numbers, which count steps
_FEW = 8  # elements of a mean that may well all be above 0 in one state and not in another


class Profile(NamedTuple):
    """The compared properties of a leaf: root mean square, whether it may be negative, and its factor."""

    size: float
    negative: bool
    factor: float


def profile(leaves: Sequence[np.ndarray | jax.Array | Blocks]) -> list[Profile]:
    """The profiles of a state's leaves, or of what one host has of them."""
    found = []
    for leaf in leaves:
        arrays = list(leaf.blocks.values()) if isinstance(leaf, Blocks) else [np.asarray(leaf)]
        whole = all(np.issubdtype(array.dtype, np.integer) for array in arrays)
        count = sum(array.size for array in arrays)
        squares = sum(np.square(array, dtype=np.float32).sum(dtype=np.float64) for array in arrays)
        size = whole + (float(np.sqrt(squares / count)) if count else 0.0)  # a count may well be 0
        negative = any(bool((array < 0).any()) for array in arrays) or (count < _FEW and not whole)
        found.append(Profile(size, negative, _COUNT_FACTOR if whole else _FACTOR))
    return found


def alike(ours: Sequence[Profile], theirs: Sequence[Profile]) -> bool:
    """Whether no leaf of theirs is far longer or shorter than ours, or below 0 where ours is not."""
    for own, other in zip(ours, theirs, strict=True):
        if not own.size:  # nothing to compare, as in a gradient sum that was just used
            continue
        if other.negative and not own.negative:
            return False
        if max(own.size, other.size) > own.factor * min(own.size, other.size):
            return False
    return True


def check_alike(ours: Sequence[np.ndarray | jax.Array | Blocks], theirs: Sequence[Any]) -> None:
    """Raises ValueError where a peer's blocks are unlike those of the learner's own last state."""
    if not alike(profile(ours), profile(theirs)):
        raise ValueError("they are unlike the own copy")


class Comparison:
    """Holds what peers give against the learner's own last copy, or, without one, against each other.

    Example:
      >>> states = [InnerState(9, (), [np.full(9, x)], trained=500) for x in (1.0, 1e6, -1.0, 2.0)]
      >>> comparison = Comparison(states[0])
      >>> [comparison.agrees(state) for state in states[1:]]
      [False, False, True]
    """

    def __init__(self, own: InnerState | None) -> None:
        """`own`: the last copy, which is not compared with before it has `MEANINGFUL_STEPS` steps."""
        comparable = own is not None and own.trained >= MEANINGFUL_STEPS
        self._own = comparable
        self._known = [profile(own.arrays)] if comparable else []
        self._alone: InnerState | None = None
        self.unlike = False  # whether something that came was like nothing else

    def agrees(self, state: InnerState) -> bool:
        """Whether the state is like the own copy, or like one that came before."""
        found = profile(state.arrays)
        if any(alike(known, found) and (self._own or alike(found, known)) for known in self._known):
            return True
        self.unlike |= bool(self._known)
        if not self._own:
            self._alone = None if self._known else state
            self._known.append(found)
        return False

    def alone(self, peers: int) -> InnerState | None:
        """What came if there is only one peer, and so nothing to compare it with.

        Of several, the one that answers may be the one that keeps the others from it.
        """
        return self._alone if peers == 1 else None
