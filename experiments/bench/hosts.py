"""Host memory of a learner of two hosts beside one of a single process: as it joins, and as it steps.

`python -m experiments.bench.hosts FILE.json ARGUMENTS`, those of experiments.learner, is such a learner's
process. It records the memory of Python and numpy, without its devices' arrays: pairs of unix seconds and the
peak bytes since the pair before, from the end of compilation on.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from typing import Any, NamedTuple

from ddiloco.launch.ports import reserved_ports
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.remote.learner.follower import ReportingBatches
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from ddiloco.telemetry.files import read_values
from ddiloco.workers.learner_worker import LearnerWorker
from experiments.bench.measuring import row
from experiments.cli import program

ROOT = pathlib.Path(__file__).parents[2]
FRAGMENTS, STEPS, TIMEOUT = 12, 36, 900.0
TRACE_SECONDS = 0.02  # between two looks
SETTINGS = {
    "driver": "remote",
    "sync.num_learners": 1,
    "sync.num_fragments": FRAGMENTS,
    "sync.interval": FRAGMENTS,
    "mesh.fsdp": 2,
    "mesh.data": -1,
    "train.batch_size": 2,
    "train.steps": STEPS,
    "data.sequence_length": 32,
    "eval.every": 0,
    "eval.num_batches": 1,
    "eval.batch_size": 2,
    "sample.tokens": 0,
    "recovery.checkpoint_every": 0.0,
}


class Peaks(NamedTuple):
    """A host's peak bytes, without its devices' arrays.

    Attributes:
      joining: until the first step was over.
      stepping: in the second half of the steps.
    """

    joining: int
    stepping: int


def run(quick: bool = False) -> list[dict]:
    """Measures a model of 45 million parameters (`quick`: a small one), in float32 both ways.

    Returns:
      Two rows, in MB that Python and numpy had taken since the learner was compiled, the larger of the two
      hosts: `measured`. `reference`: the learner's only process. `limit`: a host's shards of the parameters
      as it joins, its shards of two fragments as it steps.
    """
    width, layers = (128, 2) if quick else (768, 6)
    found: dict[int, Peaks] = {}
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        for hosts in (1, 2):
            found[hosts] = _peaks(pathlib.Path(folder), hosts, width, layers)
    layout = _layout(width, layers)
    limits = Peaks(sum(layout.bytes) // 2, 2 * max(layout.bytes) // 2)
    return [
        row(f"hosts_{name}", *(getattr(one, name) / 1e6 for one in (found[2], found[1], limits)), "MB")
        for name in Peaks._fields
    ]


def _settings(width: int, layers: int) -> dict[str, object]:
    shape = {"model.model_dim": width, "model.num_layers": layers, "model.mlp_dim": 4 * width}
    return {**SETTINGS, **shape}


def _layout(width: int, layers: int) -> FragmentLayout:
    overrides = [[name, str(value)] for name, value in _settings(width, layers).items()]
    return assembly_of(parse(program.resolve("configs/dense.py:tiny,paper", overrides))).layout


def _peaks(folder: pathlib.Path, hosts: int, width: int, layers: int) -> Peaks:
    """Of the host that had most, in a run by hand."""
    workdir = folder / f"{hosts}-{width}"
    given = [f"--config.{name}={value}" for name, value in _settings(width, layers).items()]
    shared = ["--config=configs/dense.py:tiny,paper", *given, f"--config.remote.hosts=({hosts},)"]
    shared.append(f"--workdir={workdir}")
    flags = f"--xla_force_host_platform_device_count={2 // hosts}"
    environment = {**os.environ, "CI": "true", "XLA_FLAGS": flags}

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", *arguments, *shared]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    with reserved_ports(3) as port:
        started = [start("experiments.syncer", f"--listen=127.0.0.1:{port}")]
        files = [folder / f"{hosts}-{width}-{host}.json" for host in range(hosts)]
        for host, file in enumerate(files):
            place = [f"--syncer=127.0.0.1:{port}", "--learner_id=0"]
            if hosts > 1:
                place += [f"--process={host}", f"--processes={hosts}", f"--coordinator=127.0.0.1:{port + 1}"]
            started.append(start("experiments.bench.hosts", str(file), *place))
        try:
            for process in started:
                if process.wait(TIMEOUT):
                    raise RuntimeError(f"{process.args} ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
    steps = [line["time"] for line in read_values(workdir / "learners" / "0" / "steps.jsonl")]
    written = [json.loads(file.read_text()) for file in files]
    joining = max(size for peaks in written for at, size in peaks if at < steps[0])
    stepping = max(size for peaks in written for at, size in peaks if steps[STEPS // 2] < at < steps[-1])
    return Peaks(joining, stepping)


def trace_learner() -> None:
    """Runs the learner to its end."""
    file, *sys.argv[1:] = sys.argv[1:]
    peaks: list[tuple[float, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(TRACE_SECONDS):
            if tracemalloc.is_tracing():
                peaks.append((time.time(), tracemalloc.get_traced_memory()[1]))
                tracemalloc.reset_peak()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    _traced_from(LearnerWorker, "start")  # of the only host, or of host 0
    _traced_from(ReportingBatches, "begin")  # of the others
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
    trace_learner()
