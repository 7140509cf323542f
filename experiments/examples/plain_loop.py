"""A training loop of plain JAX dictionaries: a small network learns the sine.

python -m experiments.examples.plain_loop
python -m experiments.train --config=configs/loop.py --config.driver=remote
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ddiloco


def make_loop(place: ddiloco.Place, width: int = 32, rate: float = 0.01) -> ddiloco.Loop:
    optimizer = optax.adam(rate)

    def init():
        first, second = jax.random.split(jax.random.key(place.seed))
        params = {
            "hidden": {"w": jax.random.normal(first, (1, width)), "b": jnp.zeros(width)},
            "out": {"w": jax.random.normal(second, (width, 1)) / width**0.5, "b": jnp.zeros(1)},
        }
        return {"params": params, "optimizer": optimizer.init(params)}

    def loss_of(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
        return jnp.mean((hidden @ params["out"]["w"] + params["out"]["b"] - batch["y"]) ** 2)

    @jax.jit
    def step(state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradient, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, {"loss": loss}

    return ddiloco.Loop(
        init,
        step,
        batches=lambda: sines(place),
        params=lambda state: state["params"],
        evaluate=lambda params: loss_of(params, held_out()),
    )


def sines(place: ddiloco.Place) -> Iterator[dict[str, np.ndarray]]:
    """Batches of 64 points without end, of each learner its own."""
    random = np.random.default_rng((place.seed, place.learner))
    while True:
        x = random.uniform(-3, 3, (64, 1)).astype(np.float32)
        yield {"x": x, "y": np.sin(x)}


def held_out() -> dict[str, np.ndarray]:
    """The points by which parameters are scored."""
    x = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
    return {"x": x, "y": np.sin(x)}


if __name__ == "__main__":
    sync = {"num_fragments": 2, "interval": 8}
    trained = ddiloco.train(make_loop, "runs/plain_loop", learners=4, steps=240, sync=sync)
    print(f"held-out loss {trained.summary['eval_loss']:.4f}")
