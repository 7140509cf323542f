"""Measurements of a learner's steps at their ends, without waiting for the devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax


class StepMeter:
    """Used by the thread that sees the steps end, one after the other."""

    def __init__(
        self,
        devices: Sequence[jax.Device],
        step_flops: float | None,
        peak_flops: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_flops`: the model's operations in one step, on all `devices`; None: not known.

        `peak_flops`: operations a second of all `devices`; None: not known.
        """
        here = jax.process_index()
        self._devices = [d for d in devices if d.process_index == here and d.memory_stats() is not None]
        self._fastest = step_flops / peak_flops if step_flops and peak_flops else None
        self._clock = clock
        self._ended: float | None = None

    def interrupted(self) -> None:
        """The learner has stopped stepping: of its next step only the end will be seen."""
        self._ended = None

    def finished(self, data_wait: float) -> dict[str, float]:
        """The metrics of a step that has just ended, which waited `data_wait` seconds for its batch.

        `step_seconds` since the end of the step before, `data_wait_seconds`, `mfu`, and for each device of
        this process `peak_bytes/<id>` since it began: all that is known of these.
        """
        before, self._ended = self._ended, self._clock()
        metrics = {f"peak_bytes/{d.id}": float(d.memory_stats()["peak_bytes_in_use"]) for d in self._devices}
        if before is not None and self._ended > before:
            seconds = self._ended - before
            metrics |= {"step_seconds": seconds, "data_wait_seconds": min(data_wait, seconds)}
            if self._fastest is not None:
                metrics["mfu"] = self._fastest / seconds
        return metrics
