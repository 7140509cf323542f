"""Fragments: partition, bounds, determinism."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddiloco.outer.fragments import BALANCE_BOUND, STRATEGIES, fragment, is_embedding
from tests.long import times

NAMES = st.sampled_from(
    ["embedder/table", "head/kernel", "final_norm/scale"]
    + [f"layers/{n}/{part}" for n in range(12) for part in ("attention/kernel", "ffn/kernel", "norm/scale")]
)
SHAPES = st.dictionaries(
    NAMES, st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=20
)
DECODER = {
    "embedder/table": (1000, 64),
    "head/kernel": (64, 1000),
    "final_norm/scale": (64,),
    **{f"layers/{n}/attention/kernel": (64, 256) for n in range(12)},
    **{f"layers/{n}/ffn/kernel": (64, 512) for n in range(12)},
    **{f"layers/{n}/norm/scale": (64,) for n in range(12)},
}


def layout_or_skip(shapes, num_fragments, strategy, **options):
    try:
        return fragment(shapes, num_fragments, strategy, **options)
    except ValueError:
        assume(False)


@settings(max_examples=times(30, 60))
@given(SHAPES, st.integers(1, 12), st.sampled_from(sorted(STRATEGIES)), st.booleans())
def test_every_element_is_in_exactly_one_piece(shapes, num_fragments, strategy, split_large):
    layout = layout_or_skip(shapes, num_fragments, strategy, split_large=split_large)
    seen = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for p in range(num_fragments):
        for piece in layout.fragments[p]:
            seen[piece.name][... if piece.whole else slice(piece.start, piece.stop)] += 1
    assert all((count == 1).all() for count in seen.values())
    assert layout.num_fragments == num_fragments
    assert all(layout.fragments)
    assert sum(layout.bytes) == 4 * sum(count.size for count in seen.values())


@settings(max_examples=times(40, 100))
@given(SHAPES, st.integers(1, 12))
def test_balanced_is_within_four_thirds_of_the_mean_where_rows_are_small_enough(shapes, num_fragments):
    share = 4 * sum(int(np.prod(shape)) for shape in shapes.values()) / num_fragments
    rows = [4 * int(np.prod(shape[1:])) for shape in shapes.values()]
    assume(max(rows) <= share / 3)
    layout = fragment(shapes, num_fragments, "balanced")
    assert max(layout.bytes) <= 4 / 3 * share
    assert layout.balance == pytest.approx(max(layout.bytes) / share)


@settings(max_examples=times(30, 60))
@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(2, 3))
def test_balanced_without_splitting_is_within_four_thirds_of_the_optimum(sizes, num_fragments):
    assume(len(sizes) >= num_fragments)
    shapes = {f"t{i}": (size,) for i, size in enumerate(sizes)}
    layout = fragment(shapes, num_fragments, "balanced", split_large=False)
    best = min(
        max(sum(s for s, b in zip(sizes, bins, strict=True) if b == p) for p in range(num_fragments))
        for bins in np.ndindex(*[num_fragments] * len(sizes))
    )
    assert max(layout.bytes) <= 4 / 3 * 4 * best


def test_balanced_splits_no_tensor_that_fits_when_the_bound_holds_anyway():
    layout = fragment(DECODER, 6, "balanced")
    cut = {piece.name for pieces in layout.fragments for piece in pieces if not piece.whole}
    assert layout.balance <= 4 / 3
    assert cut == set()


def test_a_tensor_larger_than_its_share_is_cut_into_near_equal_row_ranges():
    layout = fragment({"embed/table": (103, 8), "w": (8, 8)}, 4, "tensor")
    pieces = [p for pieces in layout.fragments for p in pieces if p.name == "embed/table"]
    rows = [p.stop - p.start for p in sorted(pieces, key=lambda p: p.start)]
    assert sum(rows) == 103
    assert max(rows) - min(rows) <= 1
    assert max(rows) * 8 <= (103 * 8 + 64) / 4


def test_layer_fragments_are_contiguous_from_embedding_to_head():
    layout = fragment(DECODER, 5, "layer")
    order = []
    for p in range(5):
        order.extend(
            sorted({int(name.split("/")[1]) for name in layout.names(p) if name.startswith("layers/")})
        )
    assert order == list(range(12))
    assert "embedder/table" in layout.names(0)
    assert {"head/kernel", "final_norm/scale"} <= set(layout.names(4))


def test_more_fragments_than_layers_are_cut_between_tensors():
    shapes = {f"layers/{n}/{part}": (8, 8) for n in range(2) for part in "abc"}
    layout = fragment(shapes, 6, "layer")
    assert [layout.names(p) for p in range(6)] == [(name,) for name in sorted(shapes)]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_more_fragments_than_pieces_is_refused(strategy):
    with pytest.raises(ValueError, match="num_fragments is 3, but there are only 2 pieces"):
        fragment({"a": (4,), "b": (4,)}, 3, strategy, split_large=False)


@settings(max_examples=30)
@given(SHAPES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_layout_and_fingerprint_do_not_depend_on_the_order_of_the_dict(shapes, num_fragments, random):
    layout = layout_or_skip(shapes, num_fragments, "balanced")
    shuffled = list(shapes.items())
    random.shuffle(shuffled)
    again = fragment(dict(shuffled), num_fragments, "balanced")
    assert again == layout
    assert again.fingerprint == layout.fingerprint


def test_fingerprint_is_the_same_in_every_process_and_release():
    layout = fragment({"embed/table": (64, 4), "layers/0/w": (8, 8), "layers/0/b": ()}, 2, "balanced")
    assert layout.fingerprint == "0e1b387ac370d89189a0fd30c33e4e844552ceaf40458cc39b99140f10951437"


def test_fingerprint_tells_shapes_strategies_and_numbers_apart():
    others = [
        fragment(DECODER, 4, "balanced"),
        fragment(DECODER, 5, "balanced"),
        fragment(DECODER, 4, "tensor"),
        fragment(DECODER, 1, "tensor"),
        fragment(DECODER, 1, "balanced"),
        fragment({**DECODER, "final_norm/scale": (65,)}, 4, "balanced"),
    ]
    assert len({layout.fingerprint for layout in others}) == len(others)


def test_embedding_and_head_are_told_by_the_top_level_name():
    assert is_embedding("embedder/table")
    assert is_embedding("head/kernel")
    assert not is_embedding("layers/0/attention/heads/kernel")
    assert not is_embedding("layers/0/embed/kernel")


def test_a_vocabulary_is_cut_where_devices_can_share_the_pieces():
    layout = fragment({"embed/table": (262_144, 8), "layers/0/up": (8, 4097)}, 24)
    cut = [piece for pieces in layout.fragments for piece in pieces if not piece.whole]
    assert len(cut) >= 24
    assert all(piece.start % 128 == piece.stop % 128 == 0 for piece in cut if piece.name == "embed/table")
    assert layout.balance <= BALANCE_BOUND
    assert fragment({"embed/table": (262_143, 8)}, 24).balance <= BALANCE_BOUND
