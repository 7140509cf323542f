"""Tokens/s of M learners inside a decoupled run, against the same M step loops with no syncer."""

from __future__ import annotations

import statistics
import threading
import time

import jax

from ddiloco.local.run import run_local
from ddiloco.observe import records
from ddiloco.roles.assembly import Assembly
from ddiloco.roles.learner_arrays import Equipment
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment, parse
from experiments.bench.row import row
from experiments.front import cli

PAIRS, STEPS = 4, 96


def run(quick: bool) -> list[dict]:
    """Alternates bare loops and decoupled runs of the same length; the ratio is the median over the pairs."""
    steps = 8 if quick else STEPS
    assembly = assembly_of(experiment(steps, quick))
    bare, decoupled = [], []
    for pair in range(1 if quick else PAIRS):
        # Turn about which goes first, so that a machine that slows down or speeds up favours neither.
        both = [
            lambda: bare.append(bare_loops(assembly, steps)),
            lambda: decoupled.append(decoupled_run(assembly)),
        ]
        for measure in both if pair % 2 == 0 else reversed(both):
            measure()
    reference, measured = statistics.median(bare), statistics.median(decoupled)
    ratios = [b / a for a, b in zip(bare, decoupled, strict=True)]
    limit = reference  # a learner cannot be faster than its bare step loop
    unit = "tokens/s of all learners"
    return [row("learner", measured, reference, limit, unit, ratio=statistics.median(ratios), ratios=ratios)]


def experiment(steps: int, quick: bool) -> Experiment:
    """Four learners on a dense model of 5.4M parameters, P=24, H=24, tau=2, K=1; or a fraction."""
    config = cli.load_config("configs/dense.py:tiny")
    if quick:
        config.model.update(num_layers=1)
        config.sync.update(num_fragments=4, interval=4)
    else:
        config.model.update(num_layers=6, model_dim=256, num_heads=8, num_kv_heads=4, mlp_dim=896)
        config.sync.update(num_fragments=24, interval=24)
    config.train.update(steps=steps, batch_size=4)
    config.eval.update(every=0, num_batches=1)
    return parse(config)


def bare_loops(assembly: Assembly, steps: int) -> float:
    """Tokens/s of M threads that only draw batches and step."""
    equipment = assembly.equipment()
    done: list[records.StepDone] = []
    initial = assembly.initial_parameters()

    def loop(learner: int, own: Equipment) -> None:
        state = own.program.state_from(initial)
        for step in range(steps):
            batch = next(own.batches)
            tokens = int(batch["weights"].sum())
            state, metrics = own.program.step(state, batch, step)
            jax.block_until_ready(metrics)
            done.append(records.StepDone(learner, step + 1, time.time(), tokens, metrics))

    threads = [threading.Thread(target=loop, args=pair) for pair in enumerate(equipment)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return throughput(done)


def decoupled_run(assembly: Assembly) -> float:
    """Tokens/s of the same learners with a syncer that merges their fragments."""
    done: list = []
    outcome = run_local(assembly, done.append, threading.Event())
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return throughput([record for record in done if isinstance(record, records.StepDone)])


def throughput(done: list[records.StepDone]) -> float:
    """Tokens/s between the moments when the last learner had begun and the first one ended."""
    by_learner: dict[int, list[records.StepDone]] = {}
    for record in done:
        by_learner.setdefault(record.learner, []).append(record)
    begin = max(min(r.time for r in steps) for steps in by_learner.values())
    end = min(max(r.time for r in steps) for steps in by_learner.values())
    return sum(r.tokens for r in done if begin < r.time <= end) / (end - begin)
