"""What the guard costs a merge: payload a second with every gate, against the same merge without any."""

from __future__ import annotations

from collections.abc import Callable

from ddiloco.outer.guards import GuardConfig
from experiments.bench.measuring import medians, row
from experiments.bench.merge import NUM_LEARNERS, offers, round_of


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
    theta, sent = offers(shape)
    candidates: dict[str, Callable[[], object]] = {}
    for rule in ("rda", "direct"):
        candidates[f"guarded {rule}"] = round_of(rule, theta, sent, GuardConfig())
        candidates[rule] = round_of(rule, theta, sent)
    return candidates
