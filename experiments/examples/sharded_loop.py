"""A training loop that shards its model: the same function on one device, on several, and on several hosts.

python -m experiments.examples.sharded_loop
python -m experiments.train --config=configs/loop.py --config.mesh.fsdp=-1 --config.mesh.data=1 \\
  --config.model.factory=experiments.examples.sharded_loop:make_loop

On several hosts or slices (`remote.hosts`) each host calls the function, with one `place.mesh` over the
devices of all. `init` lays its state on that mesh; each host's `batches` reads its own rows and makes global
arrays of them; `step` is one program. Layouts must stay as `init` made them (`out_shardings`); state that is
not laid on the mesh is copied to all its devices. `tokens` gets the global batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import ddiloco

ROWS = 64  # of a learner's batch


def make_loop(place: ddiloco.Place, width: int = 64, rate: float = 0.01) -> ddiloco.Loop:
    optimizer, hosts = optax.adam(rate), jax.process_count() if place.mesh.is_multi_process else 1
    rows = NamedSharding(place.mesh, PartitionSpec(place.mesh.axis_names))  # over all devices
    axes = {"hidden": PartitionSpec(None, "fsdp"), "out": PartitionSpec("fsdp", None)}

    def fresh():
        first, second = jax.random.split(jax.random.key(place.seed))
        params = {
            "hidden": jax.random.normal(first, (1, width)),
            "out": jax.random.normal(second, (width, 1)) / width**0.5,
        }
        return {"params": params, "optimizer": optimizer.init(params)}

    def layout(path, leaf):  # moments are laid like their parameters, whose names they have
        return NamedSharding(place.mesh, axes.get(getattr(path[-1], "key", None), PartitionSpec()))

    layouts = jax.tree_util.tree_map_with_path(layout, jax.eval_shape(fresh))

    def loss_of(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"] - batch["y"]) ** 2)

    @functools.partial(jax.jit, out_shardings=(layouts, None))
    def step(state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradient, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": loss}

    def batches():
        random = np.random.default_rng((place.seed, place.learner))  # each learner its own data
        own = slice(jax.process_index() % hosts, None, hosts)  # and each host its rows of it
        while True:
            x = random.uniform(-3, 3, (ROWS, 1)).astype(np.float32)[own]
            batch = {"x": x, "y": np.sin(x)}
            yield {name: jax.make_array_from_process_local_data(rows, value) for name, value in batch.items()}

    x = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
    return ddiloco.Loop(
        jax.jit(fresh, out_shardings=layouts),
        step,
        batches,
        params=lambda state: state["params"],
        tokens=lambda batch: ROWS,
        evaluate=lambda params: loss_of(params, {"x": x, "y": np.sin(x)}),
        step_tokens=ROWS,
    )


if __name__ == "__main__":
    sync = {"num_fragments": 2, "interval": 8}
    trained = ddiloco.train(make_loop, "runs/sharded_loop", learners=4, steps=240, sync=sync)
    print(f"held-out loss {trained.summary['eval_loss']:.4f}")
