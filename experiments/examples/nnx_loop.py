"""A training loop of Flax NNX: a network with dropout learns which of two spirals a point lies on.

python -m experiments.examples.nnx_loop
python -m experiments.train --config=configs/loop.py \\
  --config.model.factory=experiments.examples.nnx_loop:make_loop
"""

import jax
import numpy as np
import optax
from flax import nnx

import ddiloco


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.05)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        return self.head(self.dropout(nnx.gelu(self.second(nnx.gelu(self.first(x)))), rngs=rngs))


def make_loop(place: ddiloco.Place, width: int = 32, rate: float = 0.01) -> ddiloco.Loop:
    def init():
        model = Net(width, nnx.Rngs(place.seed))
        return model, nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    def loss_of(model, batch, rngs=None):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], rngs), batch["label"]).mean()

    @nnx.jit
    def update(model, optimizer, batch):
        # No key in the state: all learners begin with the same, and one that comes back has another's.
        key = jax.random.fold_in(jax.random.key(place.seed), place.learner)
        rngs = nnx.Rngs(dropout=jax.random.fold_in(key, optimizer.step[...]))
        loss, gradient = nnx.value_and_grad(loss_of)(model, batch, rngs)
        optimizer.update(model, gradient)
        return loss

    def step(state, batch):
        return state, {"loss": update(*state, batch)}

    def evaluate(params):
        model, _ = init()
        nnx.update(model, params)
        model.eval()
        return loss_of(model, points(np.random.default_rng(99), 400))

    def batches():
        random = np.random.default_rng((place.seed, place.learner))  # each learner its own data
        while True:
            yield points(random, 64)

    return ddiloco.Loop(
        init, step, batches, params=lambda state: nnx.state(state[0], nnx.Param), evaluate=evaluate
    )


def points(random: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Points of the plane, (count, 2), and on which of the two spirals they lie."""
    label = random.integers(0, 2, count)
    radius = random.uniform(0.2, 1.0, count)
    angle = 5 * radius + np.pi * label
    return {
        "x": np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32),
        "label": label,
    }


if __name__ == "__main__":
    sync = {"num_fragments": 3, "interval": 12}
    trained = ddiloco.train(make_loop, "runs/nnx_loop", learners=4, steps=240, sync=sync)
    print(f"held-out loss {trained.summary['eval_loss']:.4f} nats")
