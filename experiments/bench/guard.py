"""What the guard costs a merge: payload a second with every gate, against the same merge without any."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.guards import GuardConfig
from ddiloco.outer.host_memory import aligned
from ddiloco.outer.optimizer import OuterConfig
from experiments.bench.measuring import medians, row

NUM_LEARNERS = 8


def run(quick: bool = False) -> list[dict]:
    """Merges M = 8 learners' fragments of 64 MiB (`quick`: 8 MiB) on the CPU device, in alternation.

    Returns:
      A row for each merge rule of the paper, in GB/s of payload: `measured` with the gates, `reference` and
      `limit` without. A ratio of at least 0.95 is a cost of less than 5% of a merge.
    """
    shape = (512 if quick else 4096, 4096)
    payload = NUM_LEARNERS * 4 * shape[0] * shape[1] / 1e9
    seconds = medians(_candidates(shape), repetitions=3 if quick else 31, warm_up=3)
    speed = {name: payload / median for name, median in seconds.items()}
    return [
        row(f"guarded_{rule}", speed[f"guarded {rule}"], speed[rule], speed[rule], "GB/s")
        for rule in ("rda", "direct")
    ]


def _candidates(shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(shape, np.float32)
    shared = rng.standard_normal(shape, np.float32)
    sent = [
        (aligned(theta + (shared + rng.standard_normal(shape, np.float32)) / 100),)
        for _ in range(NUM_LEARNERS)
    ]
    counts, learners = [(24, 24_000)] * NUM_LEARNERS, range(NUM_LEARNERS)
    name = "layers/0/kernel"
    layout = fragment({name: shape}, 1, "balanced")
    candidates: dict[str, Callable[[], object]] = {}
    for rule in ("rda", "direct"):
        for label, guard in ((f"guarded {rule}", GuardConfig()), (rule, GuardConfig(gates=()))):
            config = OuterConfig(merge=rule, optimizer="nesterov", guard=guard)
            model = GlobalModel(layout, {name: theta}, config, NUM_LEARNERS)
            model.compile()
            candidates[label] = lambda model=model: model.merge(0, sent, counts, learners)
    return candidates
