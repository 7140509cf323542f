"""How fast merges run: payload a second of each merge rule against one plain weighted average.

M = 8 learners send a fragment of 64 MiB each; payload is the M x 64 MiB that a merge must read at least
once. Everything is measured in alternation in one process, and medians are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.arrays.host_memory import aligned, aligned_empty
from ddiloco.outer.codecs import CODECS
from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.guards import GuardConfig
from ddiloco.outer.merging import MERGE_RULES, Sent
from ddiloco.outer.optimizer import OuterConfig
from experiments.bench.measuring import medians, row

NUM_LEARNERS = 8
REFERENCE = "plain_average"
LIMIT = "memory_copy"
NO_GUARD = GuardConfig(gates=())


def run(quick: bool = False) -> list[dict]:
    """Measures on the CPU device; `quick`: few repetitions, and fragments of 2 MiB.

    Returns:
      A row per measurement, in GB/s of payload: `measured`, `reference` (the plain jitted weighted average of
      the same arrays, which takes new memory for its result), their `ratio`, and `limit` (numpy copying the
      payload to memory that it has). The rules by their bare names write their result where the one before
      was, as the global model has them do.
      `global_model_*` are whole rounds of the syncer: offers as they come, merge, Nesterov step, metrics;
      `_int4`: of offers in that codec, whose payload counts as float32 too.
    """
    rows_of_fragment = 128 if quick else 4096
    shape = (rows_of_fragment, 4096)
    payload = NUM_LEARNERS * 4 * rows_of_fragment * 4096 / 1e9
    # Three to warm up: compile, and let the global model have a retired version to write into.
    seconds = medians(_candidates(shape), repetitions=3 if quick else 21, warm_up=3)
    speed = {name: payload / median for name, median in seconds.items()}
    return [
        row(name, speed[name], speed[REFERENCE], speed[LIMIT], "GB/s")
        for name in sorted(speed, key=lambda name: name != "rda")  # the one that is hard to make fast, first
        if name not in (REFERENCE, LIMIT)
    ]


def _candidates(shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    cpu = jax.local_devices(backend="cpu")[0]
    theta, sent = offers(shape)
    vectors = [jax.device_put(array, cpu) for array in sent]
    weights = jax.device_put(np.full(NUM_LEARNERS, 1 / NUM_LEARNERS, np.float32), cpu)
    copy = np.zeros(shape, np.float32)

    def memory_copy() -> None:
        for array in sent:
            np.copyto(copy, array)

    @jax.jit
    def plain_average(vectors: list[jax.Array], weights: jax.Array) -> jax.Array:
        return sum(weights[m] * vector for m, vector in enumerate(vectors))

    candidates: dict[str, Callable[[], object]] = {
        LIMIT: memory_copy,
        REFERENCE: lambda: plain_average(vectors, weights),
    }
    for name, rule in MERGE_RULES.items():
        candidates[name] = _into_kept_memory(rule, vectors, weights)
    for name in MERGE_RULES:
        candidates[f"global_model_{name}"] = round_of(name, theta, sent)
    candidates["global_model_rda_int4"] = round_of("rda", theta, sent, codec="int4")
    return candidates


def _into_kept_memory(rule: Callable, vectors: list[jax.Array], weights: jax.Array) -> Callable[[], object]:
    def merge(kept: jax.Array, vectors: list[jax.Array], weights: jax.Array) -> jax.Array:
        del kept
        return rule(Sent(vectors, weights)).value

    compiled = jax.jit(merge, donate_argnums=0, keep_unused=True)
    result = [jnp.zeros_like(vectors[0])]

    def again() -> jax.Array:
        result[0] = compiled(result[0], vectors, weights)
        return result[0]

    return again


def offers(shape: tuple[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A fragment and what M learners, who agree in part on where to go, send of it."""
    rng = np.random.default_rng(0)
    theta, shared = (rng.standard_normal(shape, np.float32) for _ in range(2))
    sent = [aligned_empty(shape) for _ in range(NUM_LEARNERS)]
    for array in sent:
        np.add(theta, 0.01 * (shared + rng.standard_normal(shape, np.float32)), out=array)
    return theta, sent


def round_of(
    rule: str, theta: np.ndarray, sent: list[np.ndarray], guard: GuardConfig = NO_GUARD, codec: str = "f32"
) -> Callable[[], object]:
    """A round of the syncer with this merge rule, to be repeated."""
    name = "layers/0/kernel"
    layout = fragment({name: theta.shape}, 1, "balanced")
    config = OuterConfig(merge=rule, optimizer="nesterov", guard=guard, codec=codec)
    model = GlobalModel(layout, {name: theta}, config, len(sent))
    model.compile()
    counts = [(24, 24_000)] * len(sent)
    came = [(array,) for array in sent]
    if codec != "f32":
        encoded = jax.jit(CODECS[codec].encode)
        came = [tuple(map(aligned, map(np.asarray, encoded(theta - array)))) for array in sent]

    def merge() -> None:
        offers = [model.read(0, arrays) for arrays in came]
        model.merge(0, offers, counts, range(len(sent)))

    return merge


def run_guard(quick: bool = False) -> list[dict]:
    """What the guard costs a merge of fragments of 64 MiB (`quick`: 8 MiB) on the CPU device.

    Returns:
      A row for each merge rule of the paper, in GB/s of payload: `measured` with the gates, `reference` and
      `limit` without. A ratio of at least 0.95 is a cost of less than 5% of a merge.
    """
    shape = (512 if quick else 4096, 4096)
    payload = NUM_LEARNERS * 4 * shape[0] * shape[1] / 1e9
    theta, sent = offers(shape)
    guards = {"guarded": GuardConfig(), "plain": NO_GUARD}
    candidates = {
        f"{name} {rule}": round_of(rule, theta, sent, guard)
        for rule in ("rda", "direct")
        for name, guard in guards.items()
    }
    seconds = medians(candidates, repetitions=3 if quick else 31, warm_up=3)
    rows = []
    for rule in ("rda", "direct"):
        plain = payload / seconds[f"plain {rule}"]
        rows.append(row(f"guarded_{rule}", payload / seconds[f"guarded {rule}"], plain, plain, "GB/s"))
    return rows
