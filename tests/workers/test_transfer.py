"""Fragments off a learner's devices and onto them, on one device and sharded over eight."""

import dataclasses
import gc
import itertools
import weakref

import jax
import numpy as np
import pytest

from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import FragmentDecoder, encode, wire_format
from ddiloco.outer.fragments import fragment, take
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.outer.outer_step import OuterStep
from ddiloco.outer.stacks import stacked, unstacked
from ddiloco.protocol.learner import KEPT_OFFERS
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.run import resources
from ddiloco.training.parameters import abstract_parameters
from ddiloco.training.sharding import parameter_shardings
from ddiloco.workers.learner_arrays import DEVICE_OFFERS, Equipment, TrainingArrays
from ddiloco.workers.transfer import FragmentTransfer, placement
from tests.training.batches import TINY, mesh_of
from tests.workbench import assert_equal

WIDE = dataclasses.replace(TINY, vocab_size=256)  # so that tensors are split already among four fragments
SHAPES = {name: leaf.shape for name, leaf in abstract_parameters(WIDE).items()}
LAYOUT = fragment(SHAPES, 4)
SPLIT = next(p for p in range(4) if any(not piece.whole for piece in LAYOUT.fragments[p]))
MESHES = {
    "one device": lambda: mesh_of(1),
    "fsdp and tensor over eight": lambda: mesh_of(8, data=1, fsdp=4, tensor=2),
    "stages over eight": lambda: mesh_of(8, data=1, stage=2, fsdp=2, tensor=2),
}


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module", params=["one device", "stages over eight"])
def shardings(request):
    return parameter_shardings(WIDE, MESHES[request.param]())


@pytest.fixture(scope="module")
def transfer(shardings):
    return FragmentTransfer(LAYOUT, shardings)


def placed(values, shardings):
    # A copy of its own: on CPU devices device_put may keep the host's memory.
    return {name: jax.device_put(value.copy(), shardings[name]) for name, value in values.items()}


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_an_update_mixes_what_is_due_and_leaves_the_rest(mixing, transfer, shardings):
    own, theirs = numbers(0), numbers(1)
    update = [np.array(piece) for piece in take(LAYOUT, SPLIT, theirs)]
    mixed = transfer.apply(SPLIT, placed(own, shardings), update, mixing)
    expected = {name: value.copy() for name, value in own.items()}
    for piece, value in zip(LAYOUT.fragments[SPLIT], update, strict=True):
        rows = expected[piece.name][piece.start : piece.stop]
        rows[...] = ((1 - mixing) * value.astype(np.float64) + mixing * rows).astype(np.float32)
    for name, leaf in mixed.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
        assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name


def test_at_mixing_0_nothing_survives_of_an_own_value_not_even_nan(transfer, shardings):
    theirs = numbers(1)
    params = placed({name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}, shardings)
    for p in range(LAYOUT.num_fragments):
        params = transfer.apply(p, params, take(LAYOUT, p, theirs), 0.0)
    assert_equal(params, theirs)


@pytest.mark.parametrize(
    ("mesh_name", "codec"),
    [
        pytest.param("stages over eight", "int8", marks=pytest.mark.slow),
        pytest.param("one device", "f32", marks=pytest.mark.slow),
        pytest.param("fsdp and tensor over eight", "int8", marks=pytest.mark.slow),
    ],
)
def test_stacked_layers_are_offered_merged_and_updated_as_if_each_were_by_itself(mesh_name, codec):
    config = OuterConfig(merge="rda", codec=codec)
    mesh, outer_step = MESHES[mesh_name](), OuterStep(LAYOUT, config, 2, of_parameters=config.all_exact)
    theta, results = {name: value * 2 for name, value in numbers(9).items()}, []
    for config in (WIDE, dataclasses.replace(WIDE, scan_layers=True)):
        shardings = parameter_shardings(config, mesh)
        transfer = FragmentTransfer(LAYOUT, shardings, codec)
        learners = [placed(stacked(numbers(seed), shardings), shardings) for seed in (0, 1)]
        for p in range(LAYOUT.num_fragments):
            pieces = take(LAYOUT, p, theta)
            anchor = transfer.place(p, pieces) if transfer.keeps_anchors else ()
            offers = [on_the_host(transfer.offer(p, params, anchor)) for params in learners]
            sent = [outer_step.measure(p, pieces, offer, codec) for offer in offers]
            merged = outer_step(p, pieces, outer_step.init(pieces), sent, weights=[1.0, 3.0]).pieces
            learners[0] = transfer.apply(p, learners[0], [np.asarray(piece) for piece in merged], 0.5)
        for name, leaf in learners[0].items():
            assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
        results.append(unstacked(jax.device_get(learners[0])))
    assert_equal(*results)


def test_a_layer_of_one_stage_is_offered_in_as_many_parts_as_there_are_devices():
    shardings = parameter_shardings(
        dataclasses.replace(WIDE, scan_layers=True), mesh_of(8, data=1, stage=2, fsdp=2, tensor=2)
    )
    name, layout = "layers/1/mlp/up/kernel", fragment(SHAPES, 1)
    laid = dict(zip(layout.names(0), placement(layout, 0, shardings), strict=True))[name]
    assert laid.shard_shape(SHAPES[name]) == (SHAPES[name][0] // 4, SHAPES[name][1] // 2)


def test_an_offer_is_a_copy_that_survives_what_donates_its_source(transfer, shardings):
    own, theirs = numbers(0), numbers(1)
    params = placed(own, shardings)
    pieces = transfer.offer(SPLIT, params)
    changed = transfer.apply(SPLIT, params, take(LAYOUT, SPLIT, theirs), 0.0)
    again = transfer.offer(SPLIT, changed)
    for ours, after, before, new in zip(
        pieces.arrays, again.arrays, take(LAYOUT, SPLIT, own), take(LAYOUT, SPLIT, theirs), strict=True
    ):
        np.testing.assert_array_equal(ours, before)
        np.testing.assert_array_equal(after, new)
    assert any(leaf.is_deleted() for leaf in params.values())


@pytest.mark.parametrize("rebase", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_fragment_has_one_program_to_be_offered_and_one_to_be_updated(rebase, shardings):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    )
    transfer, params = FragmentTransfer(LAYOUT, shardings, rebase=rebase), placed(numbers(0), shardings)
    held = transfer.place(SPLIT, pieces_of(numbers(1)))
    before = len(compiled)
    params = transfer.compile(params)
    assert len(compiled[before:]) == 2 * LAYOUT.num_fragments
    after = len(compiled)
    offer = transfer.offer(SPLIT, params, held if transfer.keeps_anchors else ())
    for kept in [(), (held,), (held, offer.own)] if rebase else [()]:
        params = transfer.apply(SPLIT, params, pieces_of(numbers(2)), 0.0, *kept)
    assert len(compiled) == after


def rebased(now, then, theirs):
    """What rebasing comes to, reckoned in float64; pieces."""
    return [t.astype(np.float64) + n - o for n, o, t in zip(now, then, theirs, strict=True)]


@pytest.mark.parametrize("offered", [True, False])
def test_a_rebased_update_keeps_what_it_does_not_contain_and_leaves_the_rest(shardings, offered):
    transfer = FragmentTransfer(LAYOUT, shardings, rebase=True)
    anchor, then, theirs, later = (numbers(seed) for seed in range(4))
    held = transfer.place(SPLIT, pieces_of(anchor))
    offer = transfer.offer(SPLIT, placed(then, shardings), held)
    assert_near(offer.on_host(), [a - b for a, b in zip(*map(pieces_of, (anchor, then)), strict=True)], 0.0)
    now = {name: value + np.float32(1e-3) * later[name] for name, value in then.items()}
    merged = offer.own if offered else ()
    params = transfer.apply(SPLIT, placed(now, shardings), pieces_of(theirs), 0.0, held, merged)
    expected = rebased(pieces_of(now), pieces_of(then if offered else anchor), pieces_of(theirs))
    assert_near(pieces_of(params), expected, 2e-6)
    assert_near(offer.own, offer.on_host(), 0.0)
    whole = {name: np.array(value) for name, value in now.items()}
    for piece, value in zip(LAYOUT.fragments[SPLIT], pieces_of(params), strict=True):
        whole[piece.name][piece.start : piece.stop] = value
    assert_equal(params, whole)
    for name, leaf in params.items():
        assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name


# Encoded offers.

BOUND = 2.0**-22  # of float32's own rounding, for parameters of a normal distribution


@pytest.fixture(scope="module")
def codec():
    return "int4"


def pieces_of(values, p=SPLIT):
    return tuple(np.array(piece) for piece in take(LAYOUT, p, values))


def on_the_host(offer):
    return list(offer.on_host())


@pytest.mark.parametrize(
    ("mesh_name", "codec"),
    [
        ("fsdp and tensor over eight", "int4"),
        ("one device", "bf16"),
        pytest.param("stages over eight", "sign", marks=pytest.mark.slow),
    ],
)
def test_an_offer_is_encoded_alike_on_one_device_and_on_many(mesh_name, codec):
    shardings = parameter_shardings(WIDE, MESHES[mesh_name]())
    transfer = FragmentTransfer(LAYOUT, shardings, codec, error_feedback=True)
    own, theirs, left = numbers(0), numbers(1), numbers(2)
    anchor, residual = (transfer.place(SPLIT, pieces_of(values)) for values in (theirs, left))
    offer = transfer.offer(SPLIT, placed(own, shardings), anchor, residual)
    arrays, rest = jax.jit(encode, static_argnums=0)(
        CODECS[codec], pieces_of(own), pieces_of(theirs), pieces_of(left)
    )
    formats = wire_format(LAYOUT, SPLIT, codec)
    assert [(a.shape, a.dtype) for a in offer.on_host()] == [tuple(f) for f in formats]
    for ours, expected in zip(offer.on_host(), arrays, strict=True):
        np.testing.assert_array_equal(ours, expected)
    for ours, expected, there in zip(offer.residual, rest, residual, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
        assert ours.sharding.is_equivalent_to(there.sharding, ours.ndim)


@dataclasses.dataclass
class Parameters:
    """A train state without an optimizer."""

    params: dict


class Program:
    """Makes states of parameters alone."""

    def __init__(self, shardings):
        self._shardings = shardings

    def state_from(self, whole, inner=None):
        assert inner is None
        return Parameters(placed(whole, self._shardings))


class Learner:
    """TrainingArrays that can be moved by hand, and the syncer's view of what they send."""

    def __init__(self, codec, error_feedback=False, rebase=False):
        shardings = parameter_shardings(WIDE, mesh_of(1))
        transfer = FragmentTransfer(LAYOUT, shardings, codec, error_feedback, rebase)
        self.arrays = TrainingArrays(Equipment(Program(shardings), transfer, itertools.repeat({}), 1))
        self._decode = FragmentDecoder(LAYOUT, codec)
        self.codec = CODECS[codec]

    def adopt(self, values):
        self.arrays.adopt([pieces_of(values, p) for p in range(LAYOUT.num_fragments)])

    def move(self, seed, size=1e-3):
        """Moves every parameter a little; gives the way of the pieces, from the new to the old."""
        before = pieces_of(self.arrays.params)
        way = numbers(seed)
        for name, leaf in self.arrays.params.items():
            self.arrays.params[name] = leaf - size * way[name]
        return [b - a for b, a in zip(before, pieces_of(self.arrays.params), strict=True)]

    def read(self, offer, anchor):
        """The outer gradient as the syncer takes it."""
        read = self._decode(SPLIT, on_the_host(offer), pieces_of(anchor))
        return [a - r for a, r in zip(pieces_of(anchor), read, strict=True)]

    def error(self, way):
        """The most that an encoding of the way may be off."""
        return self.codec.relative_error * max(np.abs(w).max() for w in way) + BOUND * 8


def assert_near(ours, expected, error):
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=error)


def plus(ours, theirs, share=1.0):
    return [x + share * np.asarray(y) for x, y in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_learner_sends_its_way_from_the_version_it_adopted_whatever_it_mixed_in(codec, mixing):
    learner = Learner(codec)
    first, second = numbers(0), numbers(1)
    learner.adopt(first)
    way = learner.move(2)
    assert_near(learner.read(learner.arrays.offer(SPLIT, 1), first), way, learner.error(way))
    learner.arrays.apply(SPLIT, mixing, pieces_of(second))
    learner.move(3)
    way = plus(pieces_of(second), pieces_of(learner.arrays.params), -1)
    assert_near(learner.read(learner.arrays.offer(SPLIT, 2), second), way, learner.error(way))


def test_beside_learners_of_lossy_codecs_one_of_f32_sends_its_way_exactly_and_keeps_no_copy():
    shardings = parameter_shardings(WIDE, mesh_of(1))
    transfer = FragmentTransfer(LAYOUT, shardings, gradients=True)
    anchor, own = numbers(0), placed(numbers(1), shardings)
    offer = transfer.offer(SPLIT, own, transfer.place(SPLIT, pieces_of(anchor)))
    for sent, then, now in zip(on_the_host(offer), pieces_of(anchor), pieces_of(own), strict=True):
        np.testing.assert_array_equal(sent, then - now)
    assert (offer.own, offer.residual) == ((), ())
    applied = transfer.apply(SPLIT, own, pieces_of(numbers(2)), 0.0)
    assert_near(pieces_of(applied), pieces_of(numbers(2)), 0.0)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_what_a_merged_encoding_left_out_comes_with_the_next_but_for_what_the_learner_keeps(codec, mixing):
    learner = Learner(codec, error_feedback=True)
    first, second = numbers(0), numbers(1)
    learner.adopt(first)
    way = learner.move(2)
    offer = learner.arrays.offer(SPLIT, 1)
    left = plus(way, learner.read(offer, first), -1)
    assert_near(offer.residual, left, BOUND * 8)
    learner.move(4)
    learner.arrays.offer(SPLIT, 2)  # a later one, which is not in the update
    learner.arrays.apply(SPLIT, mixing, pieces_of(second), merged=1)
    learner.move(3)
    to_send = plus(plus(pieces_of(second), pieces_of(learner.arrays.params), -1), left, 1 - mixing)
    sent = learner.arrays.offer(SPLIT, 3)
    assert_near(plus(learner.read(sent, second), sent.residual), to_send, BOUND * 16)


def test_an_offer_that_is_not_in_the_update_changes_nothing_of_what_the_learner_has_still_to_send(codec):
    learner = Learner(codec, error_feedback=True)
    first, second, third = numbers(0), numbers(1), numbers(2)
    learner.adopt(first)
    learner.move(3)
    merged = learner.arrays.offer(SPLIT, 1)
    learner.arrays.apply(SPLIT, 0.0, pieces_of(second), merged=1)
    learner.move(4)
    learner.arrays.offer(SPLIT, 1)  # by number like the one before; it was sent, but came too late
    learner.arrays.apply(SPLIT, 0.0, pieces_of(third))
    way = learner.move(5)
    sent = learner.arrays.offer(SPLIT, 3)
    assert_near(plus(learner.read(sent, third), sent.residual), plus(way, merged.residual), BOUND * 16)


def test_of_offers_that_are_never_merged_the_newest_stay_on_the_devices(codec):
    learner = Learner(codec)
    learner.adopt(numbers(0))
    *gone, oldest, _, _, newest = (weakref.ref(learner.arrays.offer(SPLIT, n)) for n in range(1, 9))
    gc.collect()
    assert not any(offer() for offer in gone) and oldest() is learner.arrays.offered(SPLIT, 5)
    assert newest() is learner.arrays.offered(SPLIT, 8)


def buffers(offers):
    """Bytes of the offers on devices and in host memory; arrays that share a buffer count once."""
    on_devices, on_hosts = {}, {}
    for array in (x for offer in offers for x in (*offer.arrays, *offer.own, *offer.residual)):
        if isinstance(array, jax.Array):
            on_devices[array.unsafe_buffer_pointer()] = array.nbytes
        else:
            on_hosts[array.__array_interface__["data"]] = array.nbytes
    return sum(on_devices.values()), sum(on_hosts.values())


@pytest.mark.parametrize(
    ("codec", "error_feedback"),
    [("f32", False), pytest.param("bf16", False, marks=pytest.mark.slow), ("int4", True)],
)
def test_a_learner_whose_offers_are_never_merged_has_the_memory_of_the_plan(codec, error_feedback):
    outer = OuterConfig(codec=codec, error_feedback=error_feedback)
    learner = Learner(codec, error_feedback, rebase=True)
    learner.adopt(numbers(0))
    largest = LAYOUT.bytes.index(max(LAYOUT.bytes))
    fragments, made = [*(p for p in range(LAYOUT.num_fragments) if p != largest), largest], KEPT_OFFERS + 2
    for p in fragments:
        for steps in range(made):
            learner.arrays.offer(p, steps)
    kept = range(made - KEPT_OFFERS, made)
    devices, hosts = buffers(learner.arrays.offered(p, steps) for p in fragments for steps in kept)
    each = resources.kept_offers(LAYOUT, outer, True, LAYOUT.bytes)
    assert devices == DEVICE_OFFERS * each[largest]
    assert devices == resources.device_offers(LAYOUT, outer, SyncPolicy(rebase=True), LAYOUT.bytes)
    assert devices + hosts == resources.late_offers(LAYOUT, outer)[1]


def test_an_update_has_an_offer_that_is_no_longer_on_the_devices():
    learner = Learner("f32", rebase=True)
    first, second = numbers(0), numbers(1)
    learner.adopt(first)
    learner.move(2)
    sent = on_the_host(learner.arrays.offer(SPLIT, 1))
    then = pieces_of(learner.arrays.params)
    for steps in range(2, 2 + DEVICE_OFFERS):
        learner.move(steps)
        learner.arrays.offer(0 if SPLIT else 1, steps)
    assert_near(on_the_host(learner.arrays.offered(SPLIT, 1)), sent, 0.0)
    expected = rebased(pieces_of(learner.arrays.params), then, pieces_of(second))
    learner.arrays.apply(SPLIT, 0.0, pieces_of(second), merged=1, rebase=True)
    assert_near(pieces_of(learner.arrays.params), expected, 1e-6)


def test_an_offer_that_is_made_again_leaves_the_devices_once():
    learner = Learner("int4", True, rebase=True)
    learner.adopt(numbers(0))
    other = (SPLIT + 1) % LAYOUT.num_fragments
    made = [(SPLIT, 1), (SPLIT, 1), (SPLIT, 2), *((other, steps) for steps in range(DEVICE_OFFERS - 1))]
    for fragment_, steps in made:
        learner.arrays.offer(fragment_, steps)
    kept = [learner.arrays.offered(fragment_, steps).own[0] for fragment_, steps in made[1:]]
    assert [isinstance(array, jax.Array) for array in kept] == [False] + [True] * DEVICE_OFFERS


@pytest.mark.parametrize("died", [False, True], ids=["welcomed again", "restarted"])
def test_a_learner_that_begins_anew_has_nothing_left_to_send(codec, died):
    learner = Learner(codec, error_feedback=True)
    learner.adopt(numbers(0))
    learner.move(2)
    learner.arrays.offer(SPLIT, 1)
    if died:
        learner.arrays.lose()
    theirs = numbers(1)
    learner.adopt(theirs)
    sent = learner.arrays.offer(SPLIT, 2)
    assert_near(learner.read(sent, theirs), [np.zeros_like(x) for x in pieces_of(theirs)], 0.0)
    learner.arrays.apply(SPLIT, 0.0, pieces_of(theirs), merged=1)  # of its life before
    assert all(not np.any(x) for x in learner.arrays.offer(SPLIT, 3).residual)


@pytest.mark.parametrize(
    ("name", "error_feedback"),
    [("f32", False), ("int4", False), ("int4", True), pytest.param("sign", True, marks=pytest.mark.slow)],
)
def test_with_rebase_a_learner_keeps_what_an_update_does_not_contain(name, error_feedback):
    learner = Learner(name, error_feedback, rebase=True)
    first, second, third = numbers(0), numbers(1), numbers(2)
    learner.adopt(first)
    learner.move(3)
    then = pieces_of(learner.arrays.params)
    offer = learner.arrays.offer(SPLIT, 7)
    learner.move(4)
    learner.arrays.offer(SPLIT, 8)  # not the one that is in the update
    learner.move(5)
    expected = rebased(pieces_of(learner.arrays.params), then, pieces_of(second))
    learner.arrays.apply(SPLIT, 0.0, pieces_of(second), merged=7, rebase=True)
    assert_near(pieces_of(learner.arrays.params), expected, 1e-6)
    nothing = [np.zeros_like(piece) for piece in then]
    way = plus(pieces_of(second), expected, -1)  # what it did meanwhile is in the next offer
    sent = learner.arrays.offer(SPLIT, 9)
    if name != "f32":
        told = plus(learner.read(sent, second), sent.residual or nothing)
        assert_near(
            told,
            plus(way, offer.residual or nothing),
            BOUND * 16 + (0 if error_feedback else learner.error(way)),
        )
    expected = rebased(pieces_of(learner.arrays.params), pieces_of(second), pieces_of(third))
    learner.arrays.apply(SPLIT, 0.0, pieces_of(third), rebase=True)  # without an offer of the learner
    assert_near(pieces_of(learner.arrays.params), expected, 1e-6)
    learner.arrays.apply(SPLIT, 0.0, pieces_of(first))  # which does not say how much of its work is in it
    assert_near(pieces_of(learner.arrays.params), pieces_of(first), 0.0)
