"""How long a killed learner is away: from the start of another process to its first contribution."""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from ddiloco.launch import processes
from ddiloco.telemetry.files import read_values
from experiments.bench.measuring import row

WAYS = ("restart", "restart_forked", "restart_spare")
LEARNERS, VICTIM = 3, 1
TIMEOUT = 300.0
ROOT, ENVIRONMENT = pathlib.Path(__file__).parents[2], {**os.environ, "CI": "true"}
SETTINGS = (
    "--config.driver=remote",
    "--config.inner.optimizer=adamw",
    f"--config.sync.num_learners={LEARNERS}",
    "--config.train.steps=1000000",
    "--config.eval.every=0",
    "--config.eval.num_batches=1",
    "--config.sample.tokens=0",
)
SMALL = ("--config.model.num_layers=1", "--config.model.model_dim=32", "--config.model.mlp_dim=64")


def run(quick: bool = False) -> list[dict]:
    """Three learners and a syncer as processes of this machine; one is killed, and comes back, in turn.

    Returns:
      Three rows, in seconds from the start of the new process to the first merge that its contribution is
      in: `measured`. `restart` is started by hand, `restart_forked` as driver=remote starts it, and
      `restart_spare` counts from the word to a compiled spare. `reference`: a spare that ends once it has
      compiled, with the same learners beside it. `limit`: an interpreter
      that imports jax. `gap_steps`: the longest gap between two steps of a survivor, from the kill to that
      merge, in its median steps.
    """
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        job = _Job(pathlib.Path(folder), (*SETTINGS, *(SMALL if quick else ())))
        try:
            job.start()
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
            bare, imports = [], []
            for _ in range(1 if quick else 5):
                bare.append(job.seconds_of(*job.command("learner", "--spare")))
                imports.append(job.seconds_of(sys.executable, "-c", "import jax"))
                for name in found:
                    found[name].append(job.replace(name))
        finally:
            job.end()
    reference, limit = statistics.median(bare), statistics.median(imports)
    return [
        row(
            name,
            statistics.median(seconds for seconds, _ in results),
            reference,
            limit,
            "s",
            gap_steps=max(gap for _, gap in results),
        )
        for name, results in found.items()
    ]


class _Job:
    """A run whose processes are started by hand."""

    def __init__(self, folder: pathlib.Path, settings: tuple[str, ...]) -> None:
        self._settings, self._folder = settings, folder
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._address = f"127.0.0.1:{listening.getsockname()[1]}"
        self._learners: dict[int, subprocess.Popen | BaseProcess] = {}
        processes.warm_up()
        self._others: list[subprocess.Popen] = []

    def start(self) -> None:
        """Returns when all learners have stepped for a while."""
        self._others.append(self._program("syncer", f"--listen={self._address}"))
        for m in range(LEARNERS):
            self._learners[m] = self._learner(m)
        self._until(lambda: all(len(self._steps(m)) > 30 for m in range(LEARNERS)))

    def command(self, name: str, *arguments: str) -> list[str]:
        """The command of a program of the run."""
        return [sys.executable, "-m", f"experiments.{name}", *self._arguments(*arguments)]

    def seconds_of(self, *command: str) -> float:
        """How long a process takes beside the learners; its standard input is empty."""
        begun, nothing = time.monotonic(), subprocess.DEVNULL
        subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT, stdin=nothing, stdout=nothing)
        return time.monotonic() - begun

    def replace(self, way: str) -> tuple[float, float]:
        """Kills the victim; seconds from its successor's start to the merge, and survivors' longest gap."""
        ready = self._spare() if way == "restart_spare" else None
        before = {m: len(self._steps(m)) for m in range(LEARNERS) if m != VICTIM}
        self._until(lambda: all(len(self._steps(m)) > n + 20 for m, n in before.items()))
        killed_at = time.time()
        _kill(self._learners[VICTIM])
        self._until(lambda: all(self._steps(m)[-1] > killed_at + 3.0 for m in before))
        begun = time.time()
        if way == "restart":
            self._learners[VICTIM] = self._learner(VICTIM)
        elif way == "restart_forked":
            arguments = self._arguments(f"--syncer={self._address}", f"--learner_id={VICTIM}")
            self._learners[VICTIM] = processes.start("experiments.learner", arguments, ENVIRONMENT)
        else:
            self._learners[VICTIM] = ready
            ready.stdin.write(f"{VICTIM} {self._address}\n".encode())
            ready.stdin.close()
        self._until(lambda: self._merged_after(begun) is not None)
        merged = self._merged_after(begun)
        gaps = []
        for m in before:
            steps = self._steps(m)
            usual = statistics.median(b - a for a, b in itertools.pairwise(steps) if b < killed_at)
            during = [b - a for a, b in itertools.pairwise(steps) if b > killed_at and a < merged]
            gaps.append(max(during) / usual)
        return merged - begun, max(gaps)

    def end(self) -> None:
        """Ends all processes."""
        for process in (*self._others, *self._learners.values()):
            _kill(process)

    def _spare(self) -> subprocess.Popen:
        """A spare that has compiled all: it uses no processor any more."""
        process = self._program("learner", "--spare", stdin=subprocess.PIPE)
        used = [-2.0, -1.0]
        pause = threading.Event()
        while used[-1] < 1.0 or used[-1] > used[-2]:
            pause.wait(1.0)
            fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return process

    def _learner(self, m: int) -> subprocess.Popen:
        return self._program("learner", f"--syncer={self._address}", f"--learner_id={m}")

    def _arguments(self, *more: str) -> list[str]:
        return ["--config=configs/dense.py:tiny", *self._settings, f"--workdir={self._folder}", *more]

    def _program(self, name: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(name, *arguments),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _steps(self, m: int) -> list[float]:
        lines = read_values(self._folder / "learners" / str(m) / "steps.jsonl")
        return [line["time"] for line in lines]

    def _merged_after(self, begun: float) -> float | None:
        rounds = (r for r in read_values(self._folder / "rounds.jsonl") if r["time"] > begun)
        return next((r["time"] for r in rounds if VICTIM in r["learners"]), None)

    def _until(self, condition: Callable[[], bool]) -> None:
        pause, deadline = threading.Event(), time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came of it in {TIMEOUT:g} s; see {self._folder}")
            pause.wait(0.2)


def _kill(process: subprocess.Popen | BaseProcess) -> None:
    """Ends a process, however it was started, and waits for that."""
    process.kill()
    process.wait() if isinstance(process, subprocess.Popen) else process.join()
