"""Tokens/s of M learners inside a decoupled run, against the same M step loops with no syncer."""

from __future__ import annotations

import collections
import statistics
import threading
import time

import jax

from ddiloco.telemetry.records import StepDone
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.learner_arrays import STEPS_IN_FLIGHT, Equipment
from experiments.bench.bench_model import assembly_of, run_to_the_end
from experiments.bench.measuring import alternated, row

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
