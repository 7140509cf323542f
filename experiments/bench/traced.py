"""A learner's process that writes what Python and numpy take of memory, without its devices' arrays.

`python -m experiments.bench.traced FILE.json ARGUMENTS`, those of experiments.learner: the file has pairs of
unix seconds and the most bytes since the pair before, from when the learner is compiled and begins to join.
"""

from __future__ import annotations

import json
import pathlib
import runpy
import sys
import threading
import time
import tracemalloc
from typing import Any

from ddiloco.remote.learner.follower import TellingBatches
from ddiloco.workers.learner_worker import LearnerWorker

EVERY = 0.02  # seconds


def main() -> None:
    """Runs the learner to its end."""
    file, *sys.argv[1:] = sys.argv[1:]
    peaks: list[tuple[float, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            if tracemalloc.is_tracing():
                peaks.append((time.time(), tracemalloc.get_traced_memory()[1]))
                tracemalloc.reset_peak()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    _traced_from(LearnerWorker, "start")  # of the only host, or of host 0
    _traced_from(TellingBatches, "begin")  # of the others
    try:
        runpy.run_module("experiments.learner", run_name="__main__", alter_sys=True)
    finally:
        over.set()
        thread.join()
        pathlib.Path(file).write_text(json.dumps(peaks))


def _traced_from(owner: type, name: str) -> None:
    """Begins to trace when this method is called."""
    method = getattr(owner, name)

    def traced(*arguments: Any) -> Any:
        tracemalloc.start()
        return method(*arguments)

    setattr(owner, name, traced)


if __name__ == "__main__":
    main()
