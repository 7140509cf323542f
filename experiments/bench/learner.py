"""Tokens/s of M learners inside a decoupled run, against the same M step loops with no syncer.

On a dense model of 5.4M parameters, which other benchmarks have too.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
import threading
import time
from typing import Any

import jax

from ddiloco.local.run import LocalRun
from ddiloco.outer.fragments import take
from ddiloco.run import recipes
from ddiloco.settings.experiment import parse
from ddiloco.telemetry.records import StepDone
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT, Equipment, TrainingArrays
from experiments.bench.measuring import alternated, row
from experiments.cli import program

PAIRS, STEPS = 4, 96


def run(quick: bool) -> list[dict]:
    """Alternates bare loops and decoupled runs of the same length; the ratio is the median over the pairs."""
    steps = 8 if quick else STEPS
    assembly = assembly_of(steps, quick)
    rates = alternated(
        {
            "decoupled": lambda: throughput(run_to_the_end(assembly)),
            "bare": lambda: throughput(bare_loops(assembly, steps)),
        },
        1 if quick else PAIRS,
    )
    reference, measured = statistics.median(rates["bare"]), statistics.median(rates["decoupled"])
    ratios = [b / a for a, b in zip(rates["bare"], rates["decoupled"], strict=True)]
    limit = reference  # a learner cannot be faster than its bare step loop
    unit = "tokens/s of all learners"
    return [row("learner", measured, reference, limit, unit, ratio=statistics.median(ratios), ratios=ratios)]


def bare_loops(assembly: Assembly, steps: int) -> list[StepDone]:
    """The steps of M threads that only draw batches and step."""
    equipment = assembly.equipment()
    done: list[StepDone] = []
    initial = assembly.initial_parameters()

    def loop(learner: int, own: Equipment) -> None:
        state = own.program.state_from(initial)
        in_flight: collections.deque[tuple[int, int, dict]] = collections.deque()
        for step in range(steps + STEPS_IN_FLIGHT - 1):
            if step < steps:
                batch = next(own.batches)
                state, metrics = own.program.step(state, batch, step)
                in_flight.append((step + 1, int(batch["weights"].sum()), metrics))
            if len(in_flight) == STEPS_IN_FLIGHT or step >= steps:
                number, tokens, metrics = in_flight.popleft()
                jax.block_until_ready(metrics)
                done.append(StepDone(learner, number, time.time(), tokens, metrics))

    threads = [threading.Thread(target=loop, args=pair) for pair in enumerate(equipment)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def throughput(records: list) -> float:
    """Tokens/s between the moments when the last learner had begun and the first one ended."""
    done = [record for record in records if isinstance(record, StepDone)]
    times: dict[int, list[float]] = {}
    for record in done:
        times.setdefault(record.learner, []).append(record.time)
    begin, end = max(map(min, times.values())), min(map(max, times.values()))
    return sum(r.tokens for r in done if begin < r.time <= end) / (end - begin)


def assembly_of(steps: int, quick: bool) -> Assembly:
    """Four learners for this number of steps, P=24, H=24, tau=2, K=1; `quick`: a fraction of the model."""
    config = program.load_config("configs/dense.py:tiny,paper")
    config.inner.optimizer, config.inner.learning_rate = "adamw", 3e-3  # two moments of every parameter
    if quick:
        config.model.update(num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64)
        config.data.sequence_length = 32
        config.sync.update(num_fragments=4, interval=4)
    else:
        config.model.update(num_layers=6, model_dim=256, num_heads=8, num_kv_heads=4, mlp_dim=896)
        config.sync.update(num_fragments=24, interval=24)
    config.train.update(steps=steps, batch_size=4)
    config.eval.every = None
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
