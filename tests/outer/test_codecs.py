"""What codecs promise: sizes, errors, and that nothing unsound comes back as a number."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddiloco.config import ConfigError, build, to_dict
from ddiloco.outer.codecs import CODECS, GROUP
from ddiloco.outer.encoding import FragmentDecoder, InvalidContribution, encode, encoded_bytes, wire_format
from ddiloco.outer.fragments import fragment, take
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from tests.long import times

LARGEST = {"int8": 127, "int4": 7, "int2": 1}
LOSSY = [name for name, codec in CODECS.items() if not codec.exact]
BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4, "int2": 2, "sign": 1}
LENGTHS = (0, 1, 65, 129)  # about a half and a whole group, and odd ones

# Few lengths, so that few programs are compiled; magnitudes over the whole range of the promise.
VECTORS = st.sampled_from(LENGTHS).flatmap(
    lambda n: hnp.arrays(
        np.float32, n, elements=st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)
    )
)


def there_and_back(name, x):
    codec = CODECS[name]
    arrays = jax.jit(codec.encode)(x)
    assert [(a.shape, a.dtype) for a in arrays] == [tuple(f) for f in codec.formats(x.shape)]
    decode = jax.jit(codec.decode, static_argnums=1)
    return [np.asarray(a) for a in arrays], np.asarray(decode(arrays, x.shape))


def largest_of_group(x, group):
    """For each element the largest magnitude of its group, float64."""
    flat = np.abs(x.astype(np.float64)).ravel()
    padded = np.pad(flat, (0, -flat.size % group)).reshape(-1, group)
    return np.repeat(padded.max(axis=1, initial=0), group)[: flat.size].reshape(x.shape)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=times(14, 60))
@given(x=VECTORS)
def test_the_error_is_within_the_bound_and_zeros_stay_zeros(name, x):
    codec = CODECS[name]
    _, y = there_and_back(name, x)
    bound = codec.relative_error * largest_of_group(x, codec.group) + codec.absolute_error
    assert np.all(np.abs(y.astype(np.float64) - x) <= bound)
    assert name == "sign" or np.all(y[x == 0] == 0)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=times(13, 40))
@given(
    n=st.sampled_from(LENGTHS[1:]),
    where=st.integers(0, 10**6),
    bad=st.sampled_from([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000]),  # NaNs and infinities
    rest=st.sampled_from([0.0, 1.0, 1e30]),
)
def test_what_is_not_finite_never_comes_back_as_a_number(name, n, where, bad, rest):
    x, at = np.full(n, rest, np.float32), where % n
    x.view(np.uint32)[at] = bad
    _, y = there_and_back(name, x)
    assert not np.isfinite(y[at])
    group = CODECS[name].group
    assert np.isfinite(y[np.arange(n) // group != at // group]).all(), "it spoils no other group"


@pytest.mark.parametrize("name", CODECS)
def test_a_large_array_takes_the_bits_of_its_codec_and_a_scale_of_32_bits_a_group(name):
    size = 1 << 20
    bits = BITS[name] + (32 / GROUP if CODECS[name].group > 1 else 0)
    assert sum(p.nbytes for p in CODECS[name].formats((1 << 10, 1 << 10))) == size * bits / 8


def test_bf16_is_the_nearest_bfloat16():
    x = np.concatenate([normal(1000), np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 3e38])])
    (bits,), y = there_and_back("bf16", x)
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits, expected.view(np.uint16))
    np.testing.assert_array_equal(y, expected.astype(np.float32))


@pytest.mark.parametrize("name", LARGEST)
def test_integers_are_the_nearest_multiples_of_their_groups_scale(name):
    n = 300
    x = normal(n)
    (scales, _), y = there_and_back(name, x)
    scale = largest_of_group(x, GROUP) / LARGEST[name]
    np.testing.assert_allclose(np.repeat(scales, GROUP)[:n], scale, rtol=1e-6)
    multiples = x / scale
    sure = np.abs(np.abs(multiples % 1) - 0.5) > 1e-4  # away from the middle, where float32 decides
    np.testing.assert_allclose(y[sure], (np.round(multiples) * scale)[sure], rtol=1e-6)
    assert sure.mean() > 0.9


def test_signs_come_back_with_the_mean_magnitude_of_their_group():
    x = normal(GROUP + 44)
    (scales, packed), y = there_and_back("sign", x)
    for group, start in enumerate((0, GROUP)):
        part = x[start : start + GROUP]
        np.testing.assert_allclose(scales[group], np.abs(part).mean(), rtol=1e-6)
        np.testing.assert_allclose(y[start : start + GROUP], np.sign(part) * scales[group], rtol=1e-6)
    assert packed.nbytes == 2 * GROUP // 8


def test_int4_packs_an_element_with_the_one_half_a_group_after_it():
    codes = np.resize(np.arange(-7, 8), GROUP + 70)
    (scales, packed), y = there_and_back("int4", codes.astype(np.float32))
    half = GROUP // 2
    for start, end in ((0, GROUP), (GROUP, GROUP + 70)):
        group = np.pad(codes[start:end], (0, GROUP - (end - start)))
        expected = (group[:half] & 15) | ((group[half:] & 15) << 4)
        np.testing.assert_array_equal(packed[start // 2 : start // 2 + half], expected)
    np.testing.assert_array_equal(scales, [1, 1])
    np.testing.assert_array_equal(y, codes)


# Fragments.

SHAPES = {"embed/table": (40, 7), "layers/0/w": (33, 12), "layers/0/norm": (12,), "empty": (0, 3)}
LAYOUT = fragment(SHAPES, 2)
DECODERS = {name: FragmentDecoder(LAYOUT, name) for name in CODECS}


def parameters(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {name: (size * rng.standard_normal(shape)).astype(np.float32) for name, shape in LAYOUT.shapes}


def pieces_of(params, p=0):
    return tuple(np.asarray(piece) for piece in take(LAYOUT, p, params))


def sent(name, pieces, anchor, residual=()):
    arrays, left = jax.jit(encode, static_argnums=0)(CODECS[name], pieces, anchor, residual)
    return [np.asarray(a) for a in arrays], [np.asarray(x) for x in left]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("p", [0, 1])
def test_the_syncer_reads_the_parameters_up_to_the_error_of_their_way_from_the_anchor(name, p):
    codec = CODECS[name]
    anchor, way = pieces_of(parameters(0), p), pieces_of(parameters(1, 1e-3), p)
    theta = tuple(a - w for a, w in zip(anchor, way, strict=True))
    arrays, _ = sent(name, theta, anchor)
    assert [(a.shape, a.dtype) for a in arrays] == [tuple(f) for f in wire_format(LAYOUT, p, name)]
    assert sum(a.nbytes for a in arrays) == encoded_bytes(LAYOUT, name)[p]
    for read, a, t in zip(DECODERS[name](p, arrays, anchor), anchor, theta, strict=True):
        delta = a.astype(np.float64) - t
        bound = codec.relative_error * largest_of_group(delta, codec.group) + 2.0**-23 * np.abs(a)
        assert np.all(np.abs(read - t.astype(np.float64)) <= bound + codec.absolute_error)


def test_f32_gives_back_the_very_arrays():
    arrays = pieces_of(parameters(0))
    assert DECODERS["f32"](0, arrays, pieces_of(parameters(1))) is arrays
    assert encoded_bytes(LAYOUT, "f32") == LAYOUT.bytes
    assert [f.shape for f in wire_format(LAYOUT, 1, "f32")] == list(LAYOUT.piece_shapes(1))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=times(8, 25))
@given(data=st.data())
def test_a_peer_that_sends_other_arrays_is_told_so_in_one_line(name, data):
    anchor = pieces_of(parameters(0))
    arrays = sent(name, anchor, anchor)[0] if name in LOSSY else list(anchor)
    i = data.draw(st.sampled_from([i for i, array in enumerate(arrays) if array.size]))
    change = data.draw(st.sampled_from(["longer", "shorter", "reshaped", "retyped", "missing", "extra"]))
    match change:
        case "longer":
            arrays[i] = np.concatenate([arrays[i], arrays[i][:1]])
        case "shorter":
            arrays[i] = arrays[i][: data.draw(st.integers(0, len(arrays[i]) - 1))]
        case "reshaped":
            arrays[i] = arrays[i][None]
        case "retyped":
            arrays[i] = arrays[i].astype(np.float64)
        case "missing":
            del arrays[i]
        case "extra":
            arrays.append(arrays[i])
    with pytest.raises(InvalidContribution, match=r"must be|came") as caught:
        DECODERS[name](0, arrays, anchor)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=times(8, 25))
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_of_the_right_length_are_read_or_found_unsound(name, seed):
    rng = np.random.default_rng(seed)
    anchor = pieces_of(parameters(0))
    arrays = [
        np.frombuffer(rng.bytes(f.nbytes), f.dtype).reshape(f.shape) for f in wire_format(LAYOUT, 0, name)
    ]
    read = DECODERS[name](0, arrays, tuple(map(np.zeros_like, anchor)))
    model = GlobalModel(LAYOUT, parameters(0), OuterConfig(codec=name), 1)
    if all(np.abs(x).max(initial=0) < 1e18 for x in read):  # NaN is not
        norms = [np.linalg.norm(x.astype(np.float64)) for x in read]
        np.testing.assert_allclose(model.read(0, arrays).norms, norms, rtol=1e-5, atol=1e-18)
    elif not all(np.abs(x).max(initial=0) < 1e20 for x in read):
        with pytest.raises(InvalidContribution, match="not finite or beyond"):
            model.read(0, arrays)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_sent_and_what_is_left_add_up_to_what_was_to_be_sent(name):
    anchor = tuple(np.zeros_like(x) for x in pieces_of(parameters(0)))
    theta, residual = pieces_of(parameters(1)), pieces_of(parameters(2, 0.1))
    arrays, left = sent(name, theta, anchor, residual)
    read = DECODERS[name](0, arrays, anchor)
    for t, r, rest, got in zip(theta, residual, left, read, strict=True):
        np.testing.assert_allclose(-got.astype(np.float64) + rest, -t.astype(np.float64) + r, atol=2e-6)


# Signs move a large element by the mean of its group at a time, and so bring it up more slowly.
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, 1e25], ids=str)
def test_what_the_syncer_refuses_leaves_nothing_to_come_back_later(name, bad):
    anchor = pieces_of(parameters(0))
    theta = tuple(a.copy() for a in anchor)
    next(x for x in theta if x.size).flat[0] = bad
    zeros = tuple(np.zeros_like(a) for a in anchor)
    _, left = sent(name, theta, anchor, zeros)
    assert all(np.isfinite(x).all() and np.abs(x).max(initial=0) < 1 for x in left)


# Settings.


def test_a_codec_that_there_is_not_is_told_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"codec: is 'int3', but must be one of f32, bf16, int8, int4, int2, sign$"
    ):
        build(OuterConfig, {"codec": "int3"})


def test_error_feedback_needs_a_codec_that_leaves_something():
    with pytest.raises(
        ConfigError, match=r"error_feedback: is True, but codec f32 .* of bf16, int8, int4, int2, sign$"
    ):
        build(OuterConfig, {"error_feedback": True})
    assert build(OuterConfig, {"error_feedback": True, "codec": "int4"}).error_feedback


@pytest.mark.parametrize("given", ["f32,int4", "f32, int4", ["f32", "int4"], ("f32", "int4")])
def test_codecs_by_learner_are_a_list_or_have_commas_between(given):
    outer = build(OuterConfig, {"error_feedback": True, "codec": given})
    assert outer.codec == outer.codecs == ("f32", "int4")
    assert [outer.codec_of(m) for m in range(4)] == ["f32", "int4", "int4", "int4"]
    assert not outer.all_exact
    assert [outer.with_codec(name).error_feedback for name in outer.codecs] == [False, True]
    assert build(OuterConfig, to_dict(outer)) == outer


def test_a_codec_that_is_none_is_refused_in_a_list_too():
    with pytest.raises(ConfigError, match=r"codec: is 'int3', but must be one of f32, bf16, "):
        build(OuterConfig, {"codec": "f32,int3"})
    with pytest.raises(ConfigError, match=r"error_feedback: .* codec f32 leaves nothing"):
        build(OuterConfig, {"error_feedback": True, "codec": ["f32", "f32"]})
