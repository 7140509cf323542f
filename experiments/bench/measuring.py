"""How benchmarks measure: candidates in alternation, medians compared; with other processes."""

from __future__ import annotations

import collections
import contextlib
import gc
import multiprocessing
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import jax

TIMEOUT = 120.0  # seconds to wait for a message of another process
_CPU_CLOCK_OF_A_THREAD = 6  # in Linux's numbers of clocks, beside the complement of its id
Seconds = dict[str, float]


def row(
    name: str,
    measured: float,
    reference: float,
    limit: float,
    unit: str,
    *,
    ratio: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One measurement, the reference of the same run that it is compared with, and its limit.

    `ratio`: where it is taken pair by pair; None: measured / reference. `more`: further figures, each with a
    unit in its name or none at all.
    """
    ratio = measured / reference if ratio is None else ratio
    figures = {"ratio": ratio, "reference": reference, "measured": measured, "limit": limit}
    return {"name": name, **figures, "unit": unit, **more}


def alternated(candidates: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each says, so often, every second turn in reverse: a machine that changes favours none.

    Before each, garbage is collected: until then arrays of a run that has ended stay on the devices.
    """
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            gc.collect()
            values[name].append(candidates[name]())
            print(f"turn {turn + 1} of {turns}, {name}: {values[name][-1]:.4g}", file=sys.stderr, flush=True)
    return values


def medians(
    candidates: Mapping[str, Callable[[], object]],
    repetitions: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds that each candidate takes until its arrays are ready, the median.

    They are taken in turn, so that a machine that slows down favours none; the first `warm_up` turns, which
    compile and find neither memory nor windows, do not count. `clock`: with `time.process_time` they are
    core-seconds of all threads, which other work on the machine does not lengthen.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(warm_up + repetitions):
        for name, candidate in candidates.items():
            begun = clock()
            jax.block_until_ready(candidate())
            seconds[name].append(clock() - begun)
    return {name: statistics.median(taken[warm_up:]) for name, taken in seconds.items()}


def processor_seconds() -> Seconds:
    """Processor seconds of this process by its threads: merge, disk, and exchange for all else."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    total: collections.Counter[str] = collections.Counter()
    for path in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            tid = int(path.name)
            name = names.get(tid) or (path / "comm").read_text()
            total[_purpose(name)] += time.clock_gettime(~tid << 3 | _CPU_CLOCK_OF_A_THREAD)
    return dict(total)


def _purpose(thread: str) -> str:
    if thread.startswith(("syncer-merge", "tf_")):
        return "merge"
    return "disk" if thread.startswith("syncer-commit") else "exchange"


def resident_bytes(field: str) -> int:
    """Bytes of this process by a field of Linux's status: VmRSS now, VmHWM at most so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


@contextlib.contextmanager
def another_process(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `work(pipe, *arguments)` in a fresh process until the block ends; this end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the end of the other process is seen here
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def receive_from(pipe: Connection) -> Any:
    """What the other process says next.

    Raises:
      TimeoutError: it says nothing.
      EOFError: it has ended.
    """
    if not pipe.poll(TIMEOUT):
        raise TimeoutError(f"no message of the other process in {TIMEOUT:g} s")
    return pipe.recv()
