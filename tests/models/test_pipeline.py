"""Stacks passed through pipeline stages give what they give one layer after another, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.models.stack import through_stages
from ddiloco.training.sharding import OnMesh
from tests.training.batches import mesh_of

ROWS, WIDTH = 24, 4


def layer(x, params, rows):
    """Mixes the row's own number in, so that rows that change places are found out."""
    y = jnp.tanh(x @ params["w"]) + params["b"] * rows[:, None]
    return x + y, {"sum": jnp.sum(y), "by_column": jnp.sum(y * y, axis=0)}


def one_after_another(stacks, x, rows):
    told = []
    for stack in stacks:
        x, of_stack = jax.lax.scan(lambda x, params: layer(x, params, rows), x, stack)
        told.append(of_stack)
    return x, told


def objective(run, stacks, x, rows):
    """All that comes out, weighed so that no two numbers of it can be exchanged."""
    y, told = run(stacks, x, rows)
    parts = [y, *jax.tree.leaves(told)]
    return sum(jnp.vdot(part, jnp.sin(jnp.arange(part.size)).reshape(part.shape)) for part in parts), (
        y,
        told,
    )


OFTEN = ((2, 2, 2, 3, True),)
SELDOM = (
    *((2, 1, 4, 1, False), (2, 2, 2, 3, False), (4, 2, 8, 4, False), (4, 2, 8, 4, True)),
    *((*sizes, remat) for sizes in ((2, 1, 2, 3), (4, 1, 4, 2), (2, 3, 2, 8)) for remat in (False, True)),
)


@pytest.mark.parametrize(
    ("stages", "repeats", "each", "microbatches", "remat"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)],
)
def test_stages_give_what_layers_one_after_another_give(stages, repeats, each, microbatches, remat):
    keys = iter(jax.random.split(jax.random.key(0), 3 * repeats))
    stacks = [
        {
            "w": jax.random.normal(next(keys), (each, WIDTH, WIDTH)),
            "b": jax.random.normal(next(keys), (each, WIDTH)),
        }
        for _ in range(repeats)
    ]
    x, rows = jax.random.normal(next(keys), (ROWS, WIDTH)), jnp.arange(ROWS) / ROWS
    constrain = OnMesh(mesh_of(8, stage=stages))

    def piped(stacks, x, rows):
        save = jax.checkpoint if remat else lambda step: step
        return through_stages(layer, stacks, x, rows, constrain, microbatches, save)

    def found(run):
        gradient = jax.grad(lambda *given: objective(run, *given), argnums=(0, 1), has_aux=True)
        return jax.jit(gradient)(stacks, x, rows)

    ours, expected = found(piped), found(one_after_another)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))
