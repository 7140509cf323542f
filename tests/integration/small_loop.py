"""A loop that costs nothing to compile: four small matrices learn to give back what they get."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import ddiloco
from configs import loop

SIZES = (64, 56, 64, 28, 64)  # a fragment of three has 14 KB, as much as the smallest transformer's
ROWS = 2


def get_config():
    """The settings around it, with as much of a run as the programs of these tests have."""
    config = loop.get_config()
    config.model.factory = "tests.integration.small_loop:make_loop"
    config.sync.num_learners, config.sync.num_fragments, config.sync.interval = 2, 3, 4
    return config


def make_loop(place):
    def init():
        random = np.random.default_rng(place.seed)
        shapes = itertools.pairwise(SIZES)
        params = {f"w{n}": random.normal(0, shape[0] ** -0.5, shape) for n, shape in enumerate(shapes)}
        params = {name: value.astype(np.float32) for name, value in params.items()}
        return {"params": params, "momentum": {name: np.zeros_like(x) for name, x in params.items()}}

    def loss_of(params, x):
        given = x
        for weights in params.values():
            given = jnp.tanh(given @ weights)
        return jnp.mean((given - x) ** 2)

    @jax.jit
    def step(state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradient)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, {"loss": loss}

    def batches():
        random = np.random.default_rng((place.seed, place.learner))
        while True:
            yield random.uniform(-1, 1, (ROWS, SIZES[0])).astype(np.float32)

    return ddiloco.Loop(init, step, batches, params=lambda state: state["params"])
