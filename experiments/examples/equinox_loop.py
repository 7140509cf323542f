"""A training loop of an Equinox model, on the data of plain_loop.py: a small network learns the sine.

pip install equinox
python -m experiments.examples.equinox_loop
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ddiloco
from experiments.examples.plain_loop import held_out, sines


def make_loop(place: ddiloco.Place, width: int = 32, rate: float = 0.01) -> ddiloco.Loop:
    optimizer = optax.adam(rate)

    def init():  # activation functions in it stay as they are: they are no arrays
        model = eqx.nn.MLP(1, 1, width, depth=2, activation=jnp.tanh, key=jax.random.key(place.seed))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_of(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    @eqx.filter_jit
    def step(state, batch):
        model, moments = state
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, batch)
        updates, moments = optimizer.update(gradient, moments)
        return (eqx.apply_updates(model, updates), moments), {"loss": loss}

    def evaluate(params):
        rest = eqx.filter(init()[0], eqx.is_inexact_array, inverse=True)
        return loss_of(eqx.combine(params, rest), held_out())

    params = lambda state: eqx.filter(state[0], eqx.is_inexact_array)  # noqa: E731
    return ddiloco.Loop(init, step, lambda: sines(place), params, evaluate=evaluate)


if __name__ == "__main__":
    sync = {"num_fragments": 3, "interval": 8}
    trained = ddiloco.train(make_loop, "runs/equinox_loop", learners=4, steps=240, sync=sync)
    print(f"held-out loss {trained.summary['eval_loss']:.4f}")
