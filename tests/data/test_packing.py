"""Packing against a slow reference in plain Python, for any documents and any cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.data.errors import DataError
from ddiloco.data.text import PADDING, RowStream, join, rows, windows

documents_strategy = st.lists(st.lists(st.integers(0, 258), max_size=12), min_size=1, max_size=8).filter(any)


def stream_of(documents, length):
    arrays = [np.array(document, np.int32) for document in documents]
    return RowStream(lambda index: arrays[index % len(arrays)], len(arrays), length)


def reference(documents, length, count):
    """The first `count` rows of the endlessly repeated documents, one token at a time."""
    stream, index = [], 0
    while len(stream) < count * length + 1:
        stream += [(token, index, place) for place, token in enumerate(documents[index % len(documents)])]
        index += 1
    batch = {name: [] for name in ("inputs", "targets", "segments", "positions", "weights")}
    for start in range(0, count * length, length):
        row = stream[start : start + length + 1]
        segment, position, previous = 0, 0, None
        filled = {name: [] for name in batch}
        for (token, document, _), (target, target_document, _) in itertools.pairwise(row):
            fresh = document != previous
            segment, position, previous = segment + fresh, 0 if fresh else position + 1, document
            filled["inputs"].append(token)
            filled["targets"].append(target)
            filled["segments"].append(segment)
            filled["positions"].append(position)
            filled["weights"].append(int(document == target_document))
        for name in batch:
            batch[name].append(filled[name])
    return batch


@given(documents_strategy, st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rows_equal_the_plain_reference_however_they_are_drawn(documents, length, draws):
    stream = stream_of(documents, length)
    drawn = [stream.take(count) for count in draws]
    expected = reference(documents, length, sum(draws))
    for name, want in expected.items():
        got = np.concatenate([batch[name] for batch in drawn])
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want, err_msg=name)


@given(documents_strategy, st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))
def test_a_stream_set_to_a_position_continues_as_the_one_that_reached_it(documents, length, before, after):
    first, second = stream_of(documents, length), stream_of(documents, length)
    first.take(before)
    second.take(2)
    second.position = first.position
    ours, theirs = first.take(after), second.take(after)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert first.position == second.position


def test_padding_has_segment_zero_and_no_weight():
    tokens, documents = join([np.array([5, 6, 7]), np.array([8, 9])], 9, pad=256)
    assert documents.tolist() == [0, 0, 0, 1, 1] + [PADDING] * 4
    batch = rows(windows(tokens, 4), windows(documents, 4))
    assert batch["inputs"].tolist() == [[5, 6, 7, 8], [9, 256, 256, 256]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2], [1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]


def test_documents_without_any_token_are_an_error_and_not_an_endless_loop():
    with pytest.raises(DataError, match="no document of this shard has a token"):
        stream_of([[], [], []], 4).take(1)
