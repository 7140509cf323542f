"""Versions sent as their difference from the last one: the same bits everywhere, and nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddiloco.outer.codecs import GROUP, UPDATE_CODECS
from ddiloco.outer.encoding import DifferenceEncoder, FragmentDecoder, traffic
from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from tests.long import times

SHAPES = {"a": (5, 70), "b": (3,)}
LAYOUT = fragment(SHAPES, 1)
LOSSY = [name for name, codec in UPDATE_CODECS.items() if not codec.exact]
CODES = {"int8": 127, "int4": 7}


def normal(rng, scale=1.0):
    return tuple((scale * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES.values())


def read_by_hand(name, arrays, last):
    """What any processor makes of an update: one operation after the other, in float32."""
    arrays, pieces = iter(arrays), []
    for old in last:
        if name == "bf16":
            step = (next(arrays).astype(np.uint32) << 16).view(np.float32)
        else:
            scales, codes = next(arrays), next(arrays)
            if name == "int4":
                rows = np.pad(codes, (0, -codes.size % (GROUP // 2))).reshape(-1, GROUP // 2)
                nibbles = np.concatenate([rows & 15, rows >> 4], axis=1).astype(np.int8)
                codes = np.where(nibbles > 7, nibbles - 16, nibbles).reshape(-1)
            codes = np.pad(codes, (0, -codes.size % GROUP)).reshape(-1, GROUP).view(np.int8)
            step = (codes.astype(np.float32) * scales[:, None]).reshape(-1)
        pieces.append(old - step.reshape(-1)[: old.size].reshape(old.shape))
    return pieces


@pytest.mark.parametrize("name", LOSSY)
def test_every_reader_has_the_bits_of_the_syncer_and_what_is_left_out_comes_later(name):
    rng = np.random.default_rng(0)
    encode, decode = DifferenceEncoder(LAYOUT, name), FragmentDecoder(LAYOUT, name)
    begun = held = normal(rng)
    left = tuple(map(jnp.zeros_like, held))
    exact = [x.astype(np.float64) for x in begun]
    for _ in range(20):
        steps = normal(rng, 10.0 ** rng.integers(-4, 1))
        new = tuple(map(np.subtract, held, steps))
        exact = [x + (made.astype(np.float64) - old) for x, made, old in zip(exact, new, held, strict=True)]
        update = encode(0, tuple(map(jnp.array, held)), tuple(map(jnp.array, new)), left)
        by_hand = read_by_hand(name, update.arrays, held)
        for own, theirs, hand in zip(update.pieces, decode(0, update.arrays, held), by_hand, strict=True):
            assert np.asarray(own).tobytes() == theirs.tobytes() == hand.tobytes()
        held, left = tuple(map(np.array, update.pieces)), update.left_out
        for wanted, has, rest in zip(exact, held, left, strict=True):
            np.testing.assert_allclose(has - np.asarray(rest, np.float64), wanted, atol=2e-5)


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=times(20, 60))
@given(
    x=st.sampled_from((1, 127, 128, 129)).flatmap(
        lambda n: hnp.arrays(np.float32, n, elements=st.floats(-(2.0**120), 2.0**120, width=32))
    )
)
def test_scales_are_powers_of_two_and_errors_within_the_bound(name, x):
    codec = UPDATE_CODECS[name]
    arrays = jax.jit(codec.encode)(x)
    scales = np.asarray(arrays[0])
    assert set(np.frexp(scales[scales > 0])[0]) <= {0.5}
    y = np.asarray(jax.jit(codec.decode, static_argnums=1)(arrays, x.shape)).astype(np.float64)
    groups = np.pad(np.abs(x.astype(np.float64)), (0, -x.size % GROUP)).reshape(-1, GROUP)
    largest = np.repeat(groups.max(axis=1), GROUP)[: x.size]
    assert np.all(np.abs(y - x) <= codec.relative_error * largest + codec.absolute_error)


@pytest.mark.parametrize("name", LOSSY)
def test_a_learner_that_adds_updates_has_the_global_model_even_of_a_restored_one(name):
    rng = np.random.default_rng(1)
    config = OuterConfig(update_codec=name)
    parameters = dict(zip(SHAPES, normal(rng), strict=True))
    models = [GlobalModel(LAYOUT, parameters, config, num_learners=2) for _ in range(2)]
    decode, held = FragmentDecoder(LAYOUT, name), models[0].fragment(0)[1]
    for version in range(1, 6):
        sent = [normal(rng) for _ in range(2)]
        made = models[0].merge(0, [models[0].read(0, own) for own in sent], [(1, 1), (1, 3)])
        held = decode(0, made.difference, held)
        assert [x.tobytes() for x in held] == [x.tobytes() for x in made.pieces]
        if version == 3:
            models[1].restore(0, models[0].state(0))
        elif version > 3:
            again = models[1].merge(0, [models[1].read(0, own) for own in sent], [(1, 1), (1, 3)])
            assert [x.tobytes() for x in again.pieces] == [x.tobytes() for x in made.pieces]
    sizes = traffic(LAYOUT, config)
    assert sum(array.nbytes for array in made.difference) == sizes.difference[0] < sizes.version[0]


def test_whole_versions_have_no_update_and_no_more_state():
    parameters = dict(zip(SHAPES, normal(np.random.default_rng(2)), strict=True))
    model = GlobalModel(LAYOUT, parameters, OuterConfig(), num_learners=1)
    assert model.merge(0, [model.read(0, normal(np.random.default_rng(3)))], [(1, 1)]).difference == ()
    lossy = GlobalModel(LAYOUT, parameters, OuterConfig(update_codec="int8"), num_learners=1)
    with pytest.raises(ValueError, match="fragment 0 is not of this layout and outer optimizer"):
        lossy.restore(0, model.state(0))
