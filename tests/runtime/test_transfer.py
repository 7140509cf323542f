"""Fragments off a learner's devices and onto them, on one device and sharded over eight."""

import jax
import numpy as np
import pytest

from ddiloco.outer.fragments import fragment, take
from ddiloco.protocol.messages import Contribution
from ddiloco.runtime.shelf import Shelf
from ddiloco.runtime.transfer import FragmentTransfer
from ddiloco.training.mesh import parameter_shardings
from ddiloco.training.parameters import abstract_parameters
from tests.runtime.workbench import assert_equal
from tests.training.batches import TINY, mesh_of

SHAPES = {name: leaf.shape for name, leaf in abstract_parameters(TINY).items()}
LAYOUT = fragment(SHAPES, 16)
SPLIT = next(p for p in range(16) if any(not piece.whole for piece in LAYOUT.fragments[p]))
MESHES = {
    "one device": lambda: mesh_of(1),
    "fsdp and tensor over eight": lambda: mesh_of(8, data=1, fsdp=4, tensor=2),
}


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module", params=MESHES, ids=str)
def shardings(request):
    return parameter_shardings(TINY, MESHES[request.param]())


@pytest.fixture(scope="module")
def transfer(shardings):
    return FragmentTransfer(LAYOUT, shardings)


def placed(values, shardings):
    # A copy of its own: on CPU devices device_put may keep the host's memory.
    return {name: jax.device_put(value.copy(), shardings[name]) for name, value in values.items()}


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
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


def test_at_mixing_1_the_own_value_stays_bit_for_bit(transfer, shardings):
    own = numbers(0)
    assert_equal(transfer.apply(SPLIT, placed(own, shardings), take(LAYOUT, SPLIT, numbers(1)), 1.0), own)


def test_a_snapshot_is_a_copy_that_survives_what_donates_its_source(transfer, shardings):
    own, theirs = numbers(0), numbers(1)
    params = placed(own, shardings)
    pieces = transfer.snapshot(SPLIT, params)
    changed = transfer.apply(SPLIT, params, take(LAYOUT, SPLIT, theirs), 0.0)
    again = transfer.snapshot(SPLIT, changed)
    for ours, after, before, new in zip(
        pieces, again, take(LAYOUT, SPLIT, own), take(LAYOUT, SPLIT, theirs), strict=True
    ):
        np.testing.assert_array_equal(ours, before)
        np.testing.assert_array_equal(after, new)
    assert any(leaf.is_deleted() for leaf in params.values())


def test_all_fragments_together_are_all_parameters(transfer, shardings):
    own = numbers(0)
    params = placed(own, shardings)
    pieces = [
        [np.asarray(piece) for piece in transfer.snapshot(p, params)] for p in range(LAYOUT.num_fragments)
    ]
    assert_equal(transfer.whole(pieces), own)


def test_compiling_changes_no_parameter(transfer, shardings):
    own = numbers(2)
    assert_equal(transfer.compile(placed(own, shardings)), own)


def contribution(fragment, step):
    return Contribution(0, 1, fragment, version=0, step=step, steps=step, tokens=10 * step)


def test_a_shelf_holds_the_newest_of_each_fragment_until_it_is_cleared():
    shelf = Shelf()
    assert shelf.get(0) is None
    shelf.put(contribution(0, 1), ("old",))
    shelf.put(contribution(1, 1), ("other",))
    shelf.put(contribution(0, 2), ("new",))
    assert shelf.get(0) == (contribution(0, 2), ("new",))
    shelf.clear(0)
    shelf.clear(0)
    assert shelf.get(0) is None
    assert shelf.get(1) == (contribution(1, 1), ("other",))
