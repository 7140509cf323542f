"""Tokens/s and MFU on one accelerator: learners that share it, a decoupled run, attention, a plain loop.

Where the process sees several devices, learners would have one each: show it one (CUDA_VISIBLE_DEVICES=0).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from ddiloco.models import model_of
from ddiloco.models.model import Output, whole_logits
from ddiloco.run import recipes
from ddiloco.settings.experiment import parse
from ddiloco.telemetry.records import StepDone
from ddiloco.workers.assembly import Assembly
from experiments.bench.learner import bare_loops, run_to_the_end, throughput
from experiments.bench.measuring import alternated, row
from experiments.cli import program

SHARING, TURNS = (2, 4), 3
STEPS = {"160m": 64, "400m": 24, "1b": 24}  # of a learner and turn: each fragment is merged in it
UNIT = "tokens/s of all learners"

Candidate = Callable[[], list[StepDone]]


def run(quick: bool, size: str) -> list[dict]:
    """A row for each comparison, all candidates in turn; `mfu` where the device's peak is known."""
    steps, turns = (8, 1) if quick else (STEPS[size], TURNS)
    alone = assembly_of(size, steps, 1, quick)
    plain = assembly_of(size, steps, 1, quick, attention="xla")
    candidates: dict[str, Candidate] = {
        "Flax and optax": lambda: flax_loop(alone, steps),
        "bare": lambda: bare_loops(alone, steps),
        "plain attention": lambda: bare_loops(plain, steps),
    }
    compared = [("bare, to Flax and optax", "bare", "Flax and optax", alone)]
    compared.append(("attention, to plain", "bare", "plain attention", alone))
    for learners in SHARING[:1] if quick else SHARING:
        shared = assembly_of(size, steps, learners, quick)
        share, decoupled = f"{learners} share it", f"{learners} decoupled"
        candidates[share] = functools.partial(bare_loops, shared, steps)
        candidates[decoupled] = functools.partial(run_to_the_end, shared)
        compared.append((f"{share}, to one", share, "bare", shared))
        compared.append((f"{decoupled}, to bare", decoupled, share, shared))
    rates = alternated({name: lambda run=run: throughput(run()) for name, run in candidates.items()}, turns)
    return [
        _compared(f"{size} {name}", assembly, rates[measured], rates[reference])
        for name, measured, reference, assembly in compared
    ]


def assembly_of(size: str, steps: int, learners: int, quick: bool, attention: str = "auto") -> Assembly:
    """Learners of the preset on this process's device; `quick`: a fraction of the model."""
    config = program.load_config(f"configs/dense.py:{size}")
    if quick:
        config.model.update(num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64)
        config.model.update(vocab_size=512, compute_dtype="float32", logits_chunk=64)
        config.data.sequence_length = 32
        config.train.batch_size = 4
        config.sync.update(num_fragments=4, interval=4)
    config.model.attention = attention
    config.train.steps = steps
    config.sync.num_learners = learners
    config.eval.every = None
    return recipes.assembly_of(parse(config))


def flax_loop(assembly: Assembly, steps: int) -> list[StepDone]:
    """The steps of a loop as anybody would write it: the model's module, optax, `jax.jit` and donation."""
    e = assembly.experiment
    [equipment] = assembly.equipment()
    module = model_of(e.model).module(e.model, nnx.Rngs(0))
    inner = e.inner
    tx = optax.chain(
        optax.clip_by_global_norm(inner.clip_norm),
        optax.adamw(inner.learning_rate, inner.b1, inner.b2, inner.eps, weight_decay=inner.weight_decay),
    )
    graph, state = nnx.split((module, nnx.Optimizer(module, tx, wrt=nnx.Param)))

    def loss_of(module: Any, batch: dict[str, jax.Array]) -> jax.Array:
        returned = module(batch["inputs"], batch["positions"], batch["segments"])
        logits = whole_logits(returned.logits if isinstance(returned, Output) else returned)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (nll * batch["weights"]).sum() / batch["weights"].sum()

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        module, optimizer = nnx.merge(graph, state)
        loss, gradient = nnx.value_and_grad(loss_of)(module, batch)
        optimizer.update(module, gradient)
        return nnx.state((module, optimizer)), loss

    jitted = jax.jit(step, donate_argnums=0)
    done: list[StepDone] = []
    before: tuple[int, int, jax.Array] | None = None
    for number in range(1, steps + 1):
        batch = next(equipment.batches)
        state, loss = jitted(state, batch)
        if before is not None:  # a step is under way while the one before it is waited for
            done.append(_finished(*before))
        before = number, int(batch["weights"].sum()), loss
    return [*done, _finished(*before)] if before is not None else done


def _finished(number: int, tokens: int, loss: jax.Array) -> StepDone:
    jax.block_until_ready(loss)
    return StepDone(0, number, time.time(), tokens, {"loss": loss})


def _compared(name: str, assembly: Assembly, ours: list[float], theirs: list[float]) -> dict:
    """`limit`: the tokens/s at the device's peak, or those of the reference where that is not known."""
    e, mesh = assembly.experiment, assembly.learner_meshes()[0]
    tokens = e.batch_size(0) * e.data.sequence_length
    flops, peak = assembly.recipe.step_flops(assembly.recipe.kind((0,))), assembly.peak_flops(mesh)
    most = None if peak is None else peak * tokens / flops
    rate, against = statistics.median(ours), statistics.median(theirs)
    return row(
        name,
        rate,
        against,
        most or against,
        UNIT,
        ratio=statistics.median(np.divide(ours, theirs).tolist()),
        mfu=most and rate / most,
        reference_mfu=most and against / most,
        device=mesh.devices.flat[0].device_kind,
    )
