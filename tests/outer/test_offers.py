"""Offers stay encoded until they are merged: the merge of encoded offers is that of the decoded ones."""

import jax
import numpy as np
import pytest

from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import encode, encoded_bytes, wire_format
from ddiloco.outer.fragments import fragment, take
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.guards import SAMPLE, sample_counts, sample_lines
from ddiloco.outer.merging import MERGE_RULES
from ddiloco.outer.offers import OfferSampler
from ddiloco.outer.optimizer import OuterConfig

# Whole groups, groups that are cut short, fewer elements than a group, and none.
SHAPES = {"layers/0/w": (16, 40), "layers/0/b": (33, 7), "layers/0/norm": (12,), "layers/0/empty": (0, 3)}
LAYOUT = fragment(SHAPES, 1)
LEARNERS = 5


def vectors(seed):
    rng, shared = np.random.default_rng(seed), np.random.default_rng(99)
    drawn = {name: shared.standard_normal(shape) for name, shape in SHAPES.items()}
    whole = {n: (x + rng.standard_normal(x.shape)).astype(np.float32) for n, x in drawn.items()}
    return tuple(np.asarray(piece) for piece in take(LAYOUT, 0, whole))


def encoded(codec, pieces):
    zeros = tuple(np.zeros_like(piece) for piece in pieces)
    negative = tuple(-piece for piece in pieces)
    arrays, _ = jax.jit(encode, static_argnums=0)(CODECS[codec], negative, zeros)
    return tuple(np.asarray(array) for array in arrays)


def decoded(codec, arrays):
    left = iter(arrays)
    shapes = LAYOUT.piece_shapes(0)
    return [
        np.asarray(CODECS[codec].decode([next(left) for _ in CODECS[codec].formats(s)], s), np.float64)
        for s in shapes
    ]


def by_hand(rule, gradients, weights):
    """The paper's rules in float64, of one tensor."""
    shares = np.array(weights) / sum(weights)
    if rule == "direct":
        return sum(w * v for w, v in zip(shares, gradients, strict=True))
    norms = [np.linalg.norm(v) for v in gradients]
    mean = sum(w * v / n for w, v, n in zip(shares, gradients, norms, strict=True))
    return np.dot(shares, norms) * mean / np.linalg.norm(mean)


MIXED = ("f32", "int4", "sign", "bf16")
OFTEN = [("f32", "direct"), ("int4", "rda"), (MIXED, "rda")]


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, rule, marks=() if (codec, rule) in OFTEN else pytest.mark.slow)
        for codec in [*CODECS, MIXED]
        for rule in ("direct", "rda")
    ],
    ids=str,
)
def test_a_merge_of_encoded_offers_is_the_mathematics_of_the_decoded_ones(codec, rule):
    config = OuterConfig(codec=codec, merge=rule, optimizer="direct")
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    model = GlobalModel(LAYOUT, parameters, config, LEARNERS, rebase=True)
    quorum, counts = [4, 0, 2], [(10, 100), (5, 50), (10, 300)]
    sent = {m: encoded(config.codec_of(m), vectors(m)) for m in quorum}
    made = model.merge(0, [model.read(0, sent[m], m) for m in quorum], counts, quorum)
    gradients = [decoded(config.codec_of(m), sent[m]) for m in quorum]
    weights = [tokens * tokens / steps for steps, tokens in counts]
    for i, piece in enumerate(made.pieces):
        if piece.size:
            expected = -by_hand(rule, [v[i] for v in gradients], weights)
            np.testing.assert_allclose(piece, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, marks=() if r in ("clipped", "trimmed") else pytest.mark.slow) for r in MERGE_RULES],
)
def test_every_rule_makes_of_encoded_offers_what_it_makes_of_the_decoded_ones(rule):
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    made = {}
    for codec in ("int4", "f32"):
        config = OuterConfig(codec=codec, merge=rule, optimizer="direct")
        model = GlobalModel(LAYOUT, parameters, config, LEARNERS, rebase=True)
        offers = []
        for m in range(LEARNERS):
            arrays = encoded("int4", vectors(m))
            if codec == "f32":
                arrays = [x.astype(np.float32) for x in decoded("int4", arrays)]
            offers.append(model.read(0, arrays, m))
        made[codec] = model.merge(0, offers, [(1, 1)] * LEARNERS, range(LEARNERS)).pieces
    for one, other in zip(made["int4"], made["f32"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_an_offer_that_was_read_takes_the_bytes_that_came(codec):
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    model = GlobalModel(LAYOUT, parameters, OuterConfig(codec=codec), LEARNERS, rebase=True)
    offer = model.read(0, encoded(codec, vectors(0)))
    assert sum(array.nbytes for array in offer.arrays) == encoded_bytes(LAYOUT, codec)[0]


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "sign"])
def test_what_a_sender_puts_behind_the_elements_of_a_tensor_counts_for_nothing(codec):
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    model = GlobalModel(LAYOUT, parameters, OuterConfig(codec=codec), LEARNERS, rebase=True)
    arrays = [array.copy() for array in encoded(codec, vectors(0))]
    forms = iter(wire_format(LAYOUT, 0, codec))
    at = 0
    for shape in LAYOUT.piece_shapes(0):
        scales, packed = next(forms), next(forms)
        assert arrays[at].shape == scales.shape and arrays[at + 1].shape == packed.shape
        arrays[at + 1][:] = 0xFF
        expected = np.linalg.norm(decoded(codec, arrays)[at // 2])
        assert model.read(0, arrays).norms[at // 2] == pytest.approx(expected, rel=1e-5), shape
        at += 2


@pytest.mark.parametrize("codec", CODECS)
def test_a_sample_has_the_elements_of_the_decoded_offer(codec):
    shapes = [(300, 130), (9,), (200, 1000)]
    sizes = [39_000, 9, 200_000]
    rng = np.random.default_rng(0)
    pieces = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays = [np.asarray(a) for piece in pieces for a in jax.jit(CODECS[codec].encode)(piece)]
    lines = sample_lines(sizes, np.ones((3, 2), np.float32))
    found = OfferSampler(shapes, sample_counts(sizes))(codec, arrays, lines)
    left, expected = iter(arrays), []
    for shape, rows in zip(shapes, lines, strict=True):
        flat = np.asarray(CODECS[codec].decode([next(left) for _ in CODECS[codec].formats(shape)], shape))
        flat = flat.reshape(-1)
        whole = flat[: flat.size // 128 * 128].reshape(-1, 128)
        expected.append(flat if rows is None else whole[rows].reshape(-1))
    np.testing.assert_array_equal(found, np.concatenate(expected))
    assert 0.9 * SAMPLE < found.size <= 1.1 * SAMPLE
