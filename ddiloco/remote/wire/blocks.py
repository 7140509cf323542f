"""Blocks of arrays on the wire, where a learner's fragments lie on several hosts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ddiloco.arrays.blocks import Blocks, Cut, box_shape
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.payload import receive
from ddiloco.remote.wire.validation import WireError

MAX_BLOCKS = 4096  # of an array
MAX_AXES = 16


def cut_message(cut: Cut) -> pb.Cut:
    """The cut as a message."""
    bounds = [bound for box in cut.boxes for ends in box for bound in ends]
    return pb.Cut(shape=cut.shape, count=len(cut.boxes), bounds=bounds)


def cuts_of(messages: Sequence[pb.Cut], formats: Sequence[ArrayFormat]) -> list[Cut]:
    """The cuts in messages, one for each of these arrays; their shapes may differ from the formats'.

    Raises:
      WireError: they cannot be of these arrays.
    """
    if len(messages) != len(formats):
        raise WireError("blocks of another fragment", f"of {len(messages)} arrays, not {len(formats)}")
    return [_cut(message, form) for message, form in zip(messages, formats, strict=True)]


def wanted_cuts(message: pb.Wanted, formats: Sequence[Sequence[ArrayFormat]]) -> list[list[Cut]]:
    """By fragment, the cuts of all its arrays; raises WireError as `cuts_of`."""
    cuts = cuts_of(message.arrays, [form for fragment in formats for form in fragment])
    left = iter(cuts)
    return [[next(left) for _ in fragment] for fragment in formats]


def receive_blocks(
    formats: Sequence[ArrayFormat], cuts: Sequence[Cut], size: int, messages: Iterator[bytes]
) -> list[Blocks]:
    """Reads these blocks from a stream of messages; raises WireError as `receive`."""
    return blocks_of(cuts, receive(block_formats(formats, cuts), size, messages))


def block_formats(formats: Sequence[ArrayFormat], cuts: Sequence[Cut]) -> list[ArrayFormat]:
    """Those of the blocks of these arrays, in the order in which they are sent."""
    dtypes = [form.dtype for form in formats]
    return [
        ArrayFormat(box_shape(box), dtype)
        for cut, dtype in zip(cuts, dtypes, strict=True)
        for box in cut.boxes
    ]


def blocks_of(cuts: Sequence[Cut], arrays: Iterable[np.ndarray]) -> list[Blocks]:
    """The blocks, from arrays in that order."""
    left = iter(arrays)
    return [Blocks(cut.shape, {box: next(left) for box in cut.boxes}) for cut in cuts]


def _cut(message: pb.Cut, form: ArrayFormat) -> Cut:
    shape, axes, bounds = tuple(message.shape), len(message.shape), message.bounds
    fits = axes <= MAX_AXES and math.prod(shape) == math.prod(form.shape)
    if not fits or message.count > MAX_BLOCKS or len(bounds) != 2 * axes * message.count:
        raise WireError("blocks of another array", f"{message.count} of {list(shape)[:MAX_AXES]}")
    boxes = []
    for first in range(0, len(bounds), 2 * axes) if axes else ():
        ends = bounds[first : first + 2 * axes]
        boxes.append(tuple((ends[i], ends[i + 1]) for i in range(0, 2 * axes, 2)))
    cut = Cut(shape, tuple(boxes) if axes else ((),) * message.count)
    try:
        cut.check()
    except ValueError as error:
        raise WireError("blocks outside their array", str(error)) from None
    if cut.size > math.prod(shape):
        raise WireError("blocks of another array", "they have more elements than it")
    return cut
