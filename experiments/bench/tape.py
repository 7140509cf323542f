"""What a tape costs: time of a step, bytes of a round; and what it costs to take a step twice."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time

from ddiloco.protocol import events
from ddiloco.storage.tape.entries import Committed
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.tapes import Tapes
from experiments.bench.learner import assembly_of, initial_fragments, run_to_the_end, training_arrays
from experiments.bench.measuring import medians, row
from experiments.studies.replay.reading import read_run

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
    assembly = assembly_of(8 if quick else 96, quick)
    seconds = _steps(assembly, 4 if quick else 24)
    plain, checked = seconds["plain"], seconds["checked"]
    tape = _tape(assembly, 200 if quick else 4000)
    size = _bytes(assembly)
    return [
        row("tape", 1e6 * tape, 1e6 * plain, 1e6 * plain * ALLOWED_SHARE, "us a step"),
        row("tape_bytes", size, ALLOWED_BYTES, ALLOWED_BYTES, "bytes a round and learner"),
        row("sdc_check", 1e3 * checked, 1e3 * plain, 2e3 * plain, "ms a step"),
    ]


def _steps(assembly: Assembly, count: int) -> dict[str, float]:
    """Seconds of a plain step and of a checked one, which every second step is."""
    equipment = dataclasses.replace(assembly.own_equipment(0), verify_every=2)
    arrays, clock = training_arrays(equipment, initial_fragments(assembly)), itertools.count()
    return medians(dict.fromkeys(("plain", "checked"), lambda: arrays.step(next(clock))[1]), count)


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
                tape.heard(events.StepStarted(1024), now)
                tape.heard(events.StepFinished(), now)
                tape.heard(events.UpdateArrived(step % 24, block, step), now)
            blocks.append((time.perf_counter() - begun) / (count // 20))
        tape.end()
    return statistics.median(blocks)


def _bytes(assembly: Assembly) -> float:
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        workdir = pathlib.Path(folder)
        run_to_the_end(assembly, workdir)
        [syncer] = read_run(workdir).syncers
        rounds = sum(isinstance(entry.content, Committed) for entry in syncer.entries)
        size = sum(path.stat().st_size for path in (workdir / "tape").iterdir())
    return size / max(1, rounds) / assembly.experiment.sync.num_learners
