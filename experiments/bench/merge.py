"""How fast merges run: payload a core-second of each merge rule against one plain weighted average.

M = 8 learners send a fragment of 64 MiB each; payload is the M x 64 MiB that a merge must read at least
once. Everything is measured in alternation in one process, and medians are compared: of processor time, which
other work on the machine does not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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
      A row per measurement, in GB of payload a core-second: `measured`, `reference` (the plain jitted
      weighted average of the same arrays, which takes new memory for its result), their `ratio`, and `limit`
      (numpy copying the payload to memory that it has). The rules by their bare names are under jit by
      themselves, and write their result where the one before was. `read_*` is what the syncer does with
      offers as they come, outer gradients in a codec, and `merge_*` a merge of them with a Nesterov step and
      metrics, without a guard. `global_model_*` are both, of parameters or, with `_int4`, of outer gradients
      in that codec. The payload counts as float32.
    """
    rows_of_fragment = 128 if quick else 4096
    shape = (rows_of_fragment, 4096)
    payload = NUM_LEARNERS * 4 * rows_of_fragment * 4096 / 1e9
    # Three to warm up: compile, and let the global model have a retired version to write into.
    seconds = medians(_candidates(shape), 3 if quick else 21, warm_up=3, clock=time.process_time)
    speed = {name: payload / median for name, median in seconds.items()}
    return [
        row(name, speed[name], speed[REFERENCE], speed[LIMIT], "GB a core-second")
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
        candidates[f"global_model_{name}"] = SyncerRound(name, theta, sent)
    candidates["global_model_rda_int4"] = SyncerRound("rda", theta, sent, codec="int4")
    for rule, codec in (("rda", "f32"), ("direct", "f32"), ("rda", "int4")):
        alone = SyncerRound(rule, theta, sent, codec=codec, rebase=True)
        candidates.setdefault(f"read_{codec}", alone.read)
        candidates[f"merge_{rule}_{codec}"] = alone.merge
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


class SyncerRound:
    """A round of the syncer with this merge rule, to be repeated."""

    def __init__(
        self,
        rule: str,
        theta: np.ndarray,
        sent: Sequence[np.ndarray],
        guard: GuardConfig = NO_GUARD,
        codec: str = "f32",
        rebase: bool = False,
    ) -> None:
        """`rebase`: offers are outer gradients, as they are with any codec but f32."""
        name = "layers/0/kernel"
        layout = fragment({name: theta.shape}, 1, "balanced")
        config = OuterConfig(merge=rule, optimizer="nesterov", guard=guard, codec=codec)
        self._model = GlobalModel(layout, {name: theta}, config, len(sent), rebase=rebase)
        self._model.compile()
        self._counts = [(24, 24_000)] * len(sent)
        self._came = [(array,) for array in sent]
        if codec != "f32" or rebase:
            encoded = jax.jit(CODECS[codec].encode)
            self._came = [tuple(map(aligned, map(np.asarray, encoded(theta - array)))) for array in sent]
        self.read()

    def read(self) -> None:
        """Takes all offers as they come."""
        self._offers = [self._model.read(0, arrays) for arrays in self._came]

    def merge(self) -> None:
        """Merges them."""
        self._model.merge(0, self._offers, self._counts, range(len(self._offers)))

    def __call__(self) -> None:
        """Both."""
        self.read()
        self.merge()


def run_guard(quick: bool = False) -> list[dict]:
    """What the guard costs a merge of fragments of 64 MiB (`quick`: 8 MiB) on the CPU device.

    Returns:
      A row for each merge rule of the paper, in GB of payload a core-second: `measured` with the gates,
      `reference` and `limit` without. A ratio of at least 0.95 is a cost of less than 5% of a merge.
    """
    shape = (512 if quick else 4096, 4096)
    payload = NUM_LEARNERS * 4 * shape[0] * shape[1] / 1e9
    theta, sent = offers(shape)
    guards = {"guarded": GuardConfig(), "plain": NO_GUARD}
    candidates = {
        f"{name} {rule}": SyncerRound(rule, theta, sent, guard)
        for rule in ("rda", "direct")
        for name, guard in guards.items()
    }
    seconds = medians(candidates, 3 if quick else 31, warm_up=3, clock=time.process_time)
    rows = []
    for rule in ("rda", "direct"):
        measured, plain = (payload / seconds[f"{name} {rule}"] for name in guards)
        rows.append(row(f"guarded_{rule}", measured, plain, plain, "GB a core-second"))
    return rows
