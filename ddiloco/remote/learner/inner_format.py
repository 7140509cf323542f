"""The format of an inner optimizer's state, compared before a transfer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import jax
import numpy as np

from ddiloco.arrays.blocks import Blocks, Cut
from ddiloco.outer.codecs import ArrayFormat


class InnerFormat:
    """Shapes and dtypes of an inner optimizer's state, their fingerprint, and what this host needs of it."""

    def __init__(self, leaves: Sequence[jax.ShapeDtypeStruct], needs: Sequence[Cut] | None = None) -> None:
        """`leaves`: those of a TrainProgram; `needs`: which blocks of each. None: this is the only host."""
        self.arrays = tuple(ArrayFormat(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)
        self.whole = needs is None
        self.needs = tuple(Cut.whole(form.shape) for form in self.arrays) if needs is None else tuple(needs)
        formats = [[a.dtype.name, list(a.shape)] for a in self.arrays]
        self.fingerprint = hashlib.sha256(json.dumps(formats).encode()).hexdigest()
        self.bytes = sum(a.nbytes for a in self.arrays)

    def fits(self, arrays: Sequence[np.ndarray | jax.Array | Blocks]) -> bool:
        """Whether these are the arrays of such a state."""
        return len(arrays) == len(self.arrays) and all(
            tuple(one.shape) == form.shape and _dtypes(one) <= {form.dtype}
            for one, form in zip(arrays, self.arrays, strict=True)
        )


def _dtypes(array: np.ndarray | jax.Array | Blocks) -> set[np.dtype]:
    return {one.dtype for one in (array.blocks.values() if isinstance(array, Blocks) else [array])}
