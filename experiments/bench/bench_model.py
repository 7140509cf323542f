"""What several benchmarks measure on: a dense model of 5.4M parameters."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

from ddiloco.local.run import LocalRun
from ddiloco.outer.fragments import take
from ddiloco.run import recipes
from ddiloco.settings.experiment import parse
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from experiments.cli import program


def assembly_of(steps: int, quick: bool) -> Assembly:
    """Four learners for this number of steps, P=24, H=24, tau=2, K=1; `quick`: a fraction of the model."""
    config = program.load_config("configs/dense.py:tiny")
    config.inner.optimizer, config.inner.learning_rate = "adamw", 3e-3  # two moments of every parameter
    if quick:
        config.model.update(num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64)
        config.data.sequence_length = 32
        config.sync.update(num_fragments=4, interval=4)
    else:
        config.model.update(num_layers=6, model_dim=256, num_heads=8, num_kv_heads=4, mlp_dim=896)
        config.sync.update(num_fragments=24, interval=24)
    config.train.update(steps=steps, batch_size=4)
    config.eval.update(every=0, num_batches=1)
    return recipes.assembly_of(parse(config))


def initial_fragments(assembly: Assembly) -> list[Any]:
    """The parameters that training begins with, fragment by fragment."""
    initial = assembly.initial_parameters()
    return [take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)]


def training_arrays(equipment: Equipment, fragments: list[Any]) -> TrainingArrays:
    """A learner's arrays with these parameters."""
    arrays = TrainingArrays(equipment)
    arrays.adopt(fragments)
    return arrays


def run_to_the_end(assembly: Assembly, workdir: pathlib.Path | None = None) -> list[Any]:
    """Trains in threads of this process; the records of it. Raises RuntimeError if the run failed."""
    records: list[Any] = []
    outcome = LocalRun(assembly, records.append, threading.Event(), workdir).run()
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return records
