"""The syncer's memory by the number of learners: peak resident bytes of its process with 2 and with 16."""

from __future__ import annotations

import pathlib
import tempfile

from ddiloco.run.resources import syncer_needs
from experiments.bench.measuring import row
from experiments.bench.syncer_processes import PlayedTraffic, assembly_of, play

LEARNERS = (2, 16)


def run(quick: bool = False) -> list[dict]:
    """Measures a syncer's process of a model of 256 MiB (`quick`: 12 MiB), P = 24, through three rounds of
    each fragment, of which three are in flight at a time; learners send float32 over a real wire.

    Returns:
      One row, in MB over what the process has before it has a model: `measured` with M = 16, `reference` with
      M = 2, `limit` the model's bytes. `model_mb` too, and `needed_mb`, what --dry_run says with M = 16.
    """
    rows = 128 if quick else 2731
    few, many = (
        PlayedTraffic(1, rows, "f32", "f32", overlap=2, steps=72, core=0, learners=learners)
        for learners in LEARNERS
    )
    assembly = assembly_of(many)
    size = sum(assembly.layout.bytes) / 1e6
    needed = syncer_needs(assembly.experiment, assembly.layout).most / 1e6
    return [row("memory", _peak(many), _peak(few), size, "MB", model_mb=size, needed_mb=needed)]


def _peak(traffic: PlayedTraffic) -> float:
    """MB that the syncer's process had at most, over those that it had without a model."""
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        return play(traffic, pathlib.Path(folder) / "syncer").memory / 1e6
