"""MaxText with several learners: its config, model, optimizer, data and train step, ours around them.

python -m experiments.examples.maxtext_loop  # in an environment of its own: docs/your_own.md#maxtext
"""

import pathlib
from collections.abc import Iterator

import jax
import maxtext
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.input_pipeline.grain_data_processing import make_grain_train_iterator
from maxtext.trainers.pre_train.train import train_step
from maxtext.utils import maxtext_utils, model_creation_utils, sharding, train_utils

import ddiloco
from ddiloco.data.sources import data_root, open_text

MAXTEXT = pathlib.Path(maxtext.__file__).parent
SMALL = {"base_emb_dim": 64, "head_dim": 16, "base_mlp_dim": 256, "base_num_decoder_layers": 2}


class GrainBatches(Iterator):
    """MaxText's iterator over a learner's share of the data."""

    def __init__(self, config, mesh, place: ddiloco.Place):
        hosts = range(jax.process_count())  # each reads the share at its own place in this list
        readers = [host if m == place.learner else -1 for m in range(place.num_learners) for host in hosts]
        self._rows = make_grain_train_iterator(config, mesh, readers)
        self._layout = sharding.get_input_data_sharding(config, mesh)
        self.get_state = self._rows.local_iterator.get_state
        self.set_state = self._rows.local_iterator.set_state

    def __next__(self):
        return jax.device_put(next(self._rows), self._layout)


def make_loop(place: ddiloco.Place, **settings) -> ddiloco.Loop:
    """`settings`: MaxText's by name, such as model_name, grain_train_files or load_parameters_path."""
    settings = {
        "num_epoch": 1_000_000,  # batches do not end
        "grain_worker_count": 0,
        "hardware": place.mesh.devices.flat[0].platform,
        "log_config": False,
        **settings,
        "dataset_type": "grain",
        "init_weights_seed": place.seed,
        "internal_compile": True,  # counts the devices below, not all of JAX's
        "internal_compile_num_devices": place.mesh.size,
        "context_parallel_load_balance": False,  # which would reorder tokens
        "skip_jax_distributed_system": True,
    }
    config = pyconfig.initialize(["", str(MAXTEXT / "configs" / "base.yml")], **settings)
    devices = list(place.mesh.devices.flat)
    mesh = maxtext_utils.get_mesh_from_config(config, devices)
    make_model, model = model_creation_utils.create_nnx_abstract_model(config, mesh, devices)
    _, optimizer = train_utils.create_training_optimizer(config, model, mesh=mesh)

    def make_state():
        model = make_model()
        return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))

    abstract, _, layouts = maxtext_utils.get_abstract_state(config, mesh, make_state, True)
    with logical_axis_rules(config.logical_axis_rules):
        graph = nnx.graphdef(nnx.eval_shape(make_state))
    param_layouts, _ = sharding.maybe_update_params_sharding_with_opt(config, layouts)
    compiled, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, abstract, layouts, train_step, params_shardings=param_layouts
    )

    def step(state, batch):
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            state, metrics = compiled(state, batch)
        return state, {"loss": metrics["scalar"]["learning/lm_loss"]}

    return ddiloco.Loop(
        lambda: nnx.state(maxtext_utils.setup_training_state(None, config, mesh, None, make_state)[0]),
        step,
        lambda: GrainBatches(config, mesh, place),
        params=lambda state: state["model"].filter(nnx.Param),
        tokens=lambda batch: int((batch["targets_segmentation"] != 0).sum()),
        step_tokens=config.global_batch_size_to_train_on * config.max_target_length,
    )


if __name__ == "__main__":
    open_text("stdlib_text", "train")  # prepares its files
    files = f"{data_root(None)}/stdlib_text/*/*/*-train.array_record-*"
    tokenizer = str(MAXTEXT / "assets" / "tokenizers" / "tokenizer.default")
    data = {"grain_train_files": files, "tokenizer_path": tokenizer, "max_target_length": 128}
    training = {"per_device_batch_size": 4, "learning_rate": 3e-3, "dtype": "float32", "steps": 60}
    trained = ddiloco.train(make_loop, "runs/maxtext", steps=60, settings=SMALL | data | training)
    folder = pathlib.Path("runs/maxtext/params").absolute()
    checkpointing.save_params_to_path(folder, {"params": trained.params.to_pure_dict()})
    print(f"MaxText begins from it with load_parameters_path={folder}/items")
