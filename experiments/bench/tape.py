"""What a tape costs: time of a step, bytes of a round; and what it costs to take a step twice."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
import threading
import time

import jax

from ddiloco.disk.tape.entries import Committed
from ddiloco.disk.tape.reading import read_run
from ddiloco.local.run import run_local
from ddiloco.outer.fragments import take
from ddiloco.protocol import events
from ddiloco.roles.assembly import Assembly
from ddiloco.roles.learner_arrays import TrainingArrays
from ddiloco.roles.taping import Tapes
from ddiloco.run.recipes import assembly_of
from experiments.bench import learner as bench_learner
from experiments.bench.row import row

ALLOWED_BYTES = 1024.0  # of all tapes, a round and learner
ALLOWED_SHARE = 0.01  # of a step


def run(quick: bool = False) -> list[dict]:
    """Measures on the model of `bench learner` (`quick`: a fraction of it), in a temporary folder.

    Returns:
      Three rows. `tape`, microseconds that a learner's thread spends on its tape in a step, with an update
      every step; reference: the step itself; limit: a hundredth of it. `tape_bytes`, bytes of all tapes a
      round and learner in a local run, headers included; reference and limit: 1024. `sdc_check`, milliseconds
      of a step that is taken twice and compared; reference: a plain one; limit: two plain ones.
    """
    assembly = assembly_of(bench_learner.experiment(8 if quick else 96, quick))
    plain, checked = _steps(assembly, 4 if quick else 24)
    tape = _tape(assembly, 200 if quick else 4000)
    size = _bytes(assembly)
    return [
        row("tape", 1e6 * tape, 1e6 * plain, 1e6 * plain * ALLOWED_SHARE, "us a step"),
        row("tape_bytes", size, ALLOWED_BYTES, ALLOWED_BYTES, "bytes a round and learner"),
        row("sdc_check", 1e3 * checked, 1e3 * plain, 2e3 * plain, "ms a step"),
    ]


def _steps(assembly: Assembly, count: int) -> tuple[float, float]:
    """Seconds of a plain step and of a checked one, in turn; medians."""
    equipment = dataclasses.replace(assembly.own_equipment(0), sdc_check_every=2)
    arrays = TrainingArrays(equipment)
    initial = assembly.initial_parameters()
    arrays.adopt([take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)])
    seconds: tuple[list[float], list[float]] = ([], [])
    for clock in range(2 * count + 4):
        begun = time.perf_counter()
        _, metrics = arrays.step(clock)
        jax.block_until_ready(metrics)
        if clock >= 4:
            seconds[clock % 2].append(time.perf_counter() - begun)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _tape(assembly: Assembly, count: int) -> float:
    """Seconds that a step's entries take, an update among them; the median over blocks of steps."""
    blocks = []
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        tapes = Tapes(pathlib.Path(folder), assembly.experiment, assembly.layout, lambda record: None)
        tape = tapes.learner(0, 1, assembly.own_equipment(0))
        for block in range(20):
            begun = time.perf_counter()
            for step in range(count // 20):
                now = time.monotonic()
                tape.told(events.StepStarted(1024), now)
                tape.told(events.StepFinished(), now)
                tape.told(events.UpdateArrived(step % 24, block, step), now)
            blocks.append((time.perf_counter() - begun) / (count // 20))
        tape.end()
    return statistics.median(blocks)


def _bytes(assembly: Assembly) -> float:
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        workdir = pathlib.Path(folder)
        outcome = run_local(assembly, lambda record: None, threading.Event(), workdir)
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure)
        [syncer] = read_run(workdir).syncers
        rounds = sum(isinstance(entry.thing, Committed) for entry in syncer.entries)
        size = sum(path.stat().st_size for path in (workdir / "tape").iterdir())
    return size / max(1, rounds) / assembly.experiment.sync.num_learners
