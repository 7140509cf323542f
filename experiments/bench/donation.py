"""Whether a learner steps on while it gives its inner optimizer state away: its steps a second."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.gift import Asking, Gift
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire.security import Security
from ddiloco.training import platform
from ddiloco.workers.learner_arrays import Equipment
from experiments.bench.another_process import TIMEOUT, another_process, receive_from
from experiments.bench.bench_model import SteppingLearner, assembly_of, initial_fragments, training_arrays
from experiments.bench.measuring import medians, row


def run(quick: bool = False) -> list[dict]:
    """Measures one learner whose peer, another process, takes donation after donation (or none), in turn.

    Returns:
      One row, in steps a second: `measured` while donations go out back to back; `reference` the same learner
      without them; `limit` steps of the same arrays and nothing else, before. Also `donations` (in all),
      `donation_mb` and `slowest_step_ratio`: the longest gap between two steps with donations over without.
    """
    assembly = assembly_of(1, quick)
    equipment, fragments = assembly.own_equipment(0), initial_fragments(assembly)
    limit = _bare(equipment, fragments, 5 if quick else 40)
    inner = InnerFormat(equipment.program.inner_leaves)
    learner = SteppingLearner(equipment, fragments)
    donor = Donor(Security(), 20.0)
    port = donor.start("127.0.0.1")
    donor.attach(learner.worker.inbox, inner)
    leaves = [(leaf.shape, np.dtype(leaf.dtype).str) for leaf in equipment.program.inner_leaves]
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    try:
        with another_process(_take, f"127.0.0.1:{port}", leaves, len(fragments)) as peer:
            learner.gaps(3)
            for donating in [False, True, True, False] * (1 if quick else 4):
                peer.send(donating)
                assert receive_from(peer) == donating
                gaps[donating].append(learner.gaps(5 if quick else 30))
            peer.send(None)
            taken = receive_from(peer)
    finally:
        learner.end()
        donor.stop()
    rate = {key: 1 / statistics.median(itertools.chain.from_iterable(gaps[key])) for key in gaps}
    worst = {key: statistics.median(map(max, gaps[key])) for key in gaps}
    more = {"donations": taken, "donation_mb": inner.bytes / 1e6}
    more["slowest_step_ratio"] = worst[True] / worst[False]
    return [row("donation", rate[True], rate[False], limit, "steps/s", **more)]


def _bare(equipment: Equipment, fragments: list[Any], count: int) -> float:
    """Steps a second of the learner's arrays alone."""
    arrays, clock = training_arrays(equipment, fragments), itertools.count()
    return 1 / medians({"step": lambda: arrays.step(next(clock))[1]}, count, warm_up=0)["step"]


def _take(
    pipe: Connection, address: str, leaves: list[tuple[tuple[int, ...], str]], num_fragments: int
) -> None:
    """The other process: takes one donation after the other while it is told to."""
    platform.prepare(cache=False)
    inner = InnerFormat([jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in leaves])
    donating, taken = False, 0
    while donating is not None:
        if donating and not pipe.poll():
            gift = Gift(Asking(inner, Security(), 20.0), address, (0,) * num_fragments, TIMEOUT)
            with contextlib.closing(gift):
                gift.open().take()
            taken += 1
        else:
            donating = pipe.recv()
            pipe.send(taken if donating is None else donating)
