"""Fragments as bytes: what is put together is what was cut up, and nothing else is taken."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddiloco.arrays.host_memory import ALIGNMENT
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.wire import payload
from ddiloco.remote.wire.payload import chunks, payload_bytes, receive
from ddiloco.remote.wire.validation import WireError

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=5)
DTYPES = st.sampled_from([np.float32, np.uint8, np.int8])


def formats_of(arrays):
    return [ArrayFormat(array.shape, array.dtype) for array in arrays]


@given(SHAPES, DTYPES, st.integers(1, 50))
def test_what_is_cut_into_chunks_of_any_size_comes_out_bit_for_bit(shapes, dtype, chunk_bytes):
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 100, shape).astype(dtype) for shape in shapes]
    cut = list(chunks(sent, chunk_bytes))
    assert all(len(chunk) == chunk_bytes for chunk in cut[:-1])
    size = payload_bytes(sent)
    got = receive(formats_of(sent), size, iter(cut))
    for ours, theirs in zip(got, sent, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.size == 0 or ours.ctypes.data % ALIGNMENT == 0


@example([bytes(80)], 67)
@given(st.lists(st.binary(max_size=80), max_size=8), st.integers(0, 200))
def test_whatever_comes_is_taken_or_refused_as_malformed(messages, size):
    formats = [ArrayFormat((4, 4), np.dtype(np.float32)), ArrayFormat((3,), np.dtype(np.uint8))]
    stream = iter(messages)
    try:
        arrays = receive(formats, size, stream)
    except WireError as error:
        assert error.reason in ("fragment of another size", "chunk of another size", "fragment cut short")
        return
    assert size == 67
    assert b"".join(array.tobytes() for array in arrays) == b"".join(messages)[:67]


def test_memory_is_taken_only_once_the_announced_size_is_the_awaited_one():
    with mock.patch.object(payload, "aligned_empty") as taken, pytest.raises(WireError):
        receive([ArrayFormat((2,), np.dtype(np.float32))], 1 << 60, iter(()))
    taken.assert_not_called()


def test_reading_stops_with_the_last_byte_so_that_the_next_fragment_may_follow():
    stream = itertools.chain(chunks([np.arange(3, dtype=np.uint8)]), [b"next header"])
    receive([ArrayFormat((3,), np.dtype(np.uint8))], 3, stream)
    assert next(stream) == b"next header"


def test_arrays_that_are_not_contiguous_travel_in_row_major_order():
    sent = np.arange(12, dtype=np.float32).reshape(3, 4).T
    [got] = receive(formats_of([sent]), sent.nbytes, chunks([sent]))
    np.testing.assert_array_equal(got, sent)
