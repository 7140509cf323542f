"""What the loss of one of a learner's two hosts costs, beside what the model of an elastic job says.

Host 1 is killed again and again, with its machine: it comes back after some seconds. Beside the learner there
is another one, of a single host.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.jobs import Interruption, job_changes
from ddiloco.launch.ports import reserved_port
from ddiloco.telemetry.files import read_values
from experiments.bench.measuring import row

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 300.0  # seconds for anything that is waited for
STEP_SECONDS, WAIT = 0.25, 5.0
SETTINGS = {
    "driver": "remote",
    "sync.num_learners": 2,
    "sync.quorum": 1,
    "remote.hosts": "(2, 1)",
    "remote.min_hosts": 1,
    "remote.host_timeout": WAIT,
    "remote.gather": 0.0,
    "mesh.fsdp": -1,
    "mesh.data": 1,
    "train.steps": 1_000_000,
    "train.min_step_seconds": (STEP_SECONDS, STEP_SECONDS),
    "recovery.checkpoint_every": 2.0,
    "eval.every": None,
    "sample.tokens": 0,
    "log.page": "",
}


class Outage(NamedTuple):
    """One loss of host 1, by unix seconds."""

    killed: float
    alone: float  # the first step with one host
    stopped: float  # the last step with one host was over
    together: float  # the first step with both


class Hosts:
    """The learners' processes, each started again at once, as an engine does, unless its machine is away."""

    def __init__(self, start: Callable[..., subprocess.Popen]) -> None:
        self._start = start
        self.processes = {host: self._started(host) for host in (0, 1)}
        self.away = False

    def _started(self, host: int, *more: str) -> subprocess.Popen:
        place = ["--learner_id=0", "--processes=2", f"--process={host}"]
        return self._start("experiments.learner", *place, *more)

    def look(self) -> None:
        """Starts those again that have ended."""
        for host, process in self.processes.items():
            if process.poll() is not None and not (host and self.away):
                self.processes[host] = self._started(host, "--restarts=1")


def run(quick: bool = False) -> list[dict]:
    """Two outages of 15 s each, with 15 s between them (`quick`: one of 5 s), after one that compiles.

    Returns:
      Rows. `downscale`: mean seconds from the kill to the first step of the host that is left; reference:
      `remote.host_timeout`, for which it waits. `upscale`: from its last step alone to the first with both;
      reference: the downscale. `goodput` of the learner, of which an absent host's time is lost; reference:
      the model's, with these two times. `others`: the other learner's longest time between two steps while
      the first one changes; reference: at other times. `limit` is the reference, but for the first two.
    """
    count, seconds = (1, 5.0) if quick else (2, 15.0)
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        workdir = pathlib.Path(folder) / "run"
        (compiled, *outages), over = _outages(workdir, 1 + count, seconds)
        states = [line for line in read_values(workdir / "states.jsonl") if line["learner"] == 0]
        other = [line["time"] for line in read_values(workdir / "learners" / "1" / "steps.jsonl")]
    begun = compiled.together
    down = statistics.mean(one.alone - one.killed for one in outages)
    up = statistics.mean(one.together - one.stopped for one in outages)
    lines = Timelines({0: 2})
    for line in states:
        if begun <= line["time"] < over:
            lines.enter(0, State(line["state"]), line["time"], line["chips"])
    measured, modelled = lines.goodput(over), _modelled(begun, outages, over, down, up)
    gaps = [(a, b) for a, b in itertools.pairwise(other) if begun <= a < over]
    changing = [b - a for a, b in gaps if any(_changes(one, a, b) for one in outages)]
    steady = [b - a for a, b in gaps if not any(_changes(one, a, b) for one in outages)]
    spread = {"down_seconds": [one.alone - one.killed for one in outages]}
    spread["up_seconds"] = [one.together - one.stopped for one in outages]
    return [
        row("elastic_downscale", down, WAIT, 4 * WAIT, "s", **spread),
        row("elastic_upscale", up, down, 2 * down, "s"),
        row("elastic_goodput", measured, modelled, modelled, "share", seconds=over - begun),
        row("elastic_others", max(changing), max(steady), max(steady), "s"),
    ]


def _changes(one: Outage, since: float, until: float) -> bool:
    """Whether the first learner changes the number of its hosts meanwhile."""
    return (since < one.alone and one.killed < until) or (since < one.together and one.stopped < until)


def _modelled(begun: float, outages: list[Outage], over: float, down: float, up: float) -> float:
    """Goodput of the model's elastic job of two slices with these outages and times."""
    model = FailureModel(
        chips_per_slice=1,
        detection_seconds=0.0,
        downscale_seconds=down,
        upscale_seconds=up,
        upscale_wait_seconds=0.0,
        step_seconds=STEP_SECONDS,
    )
    struck = [Interruption(one.killed - begun, 1, one.stopped - begun) for one in outages]
    lines = Timelines({0: 2})
    for change in job_changes(model, struck, 2, 1, 0, over - begun, elastic=True):
        lines.enter(0, change.state, change.time, change.chips)
    return lines.goodput(over - begun)


def _outages(workdir: pathlib.Path, count: int, seconds: float) -> tuple[list[Outage], float]:
    """Has host 1 killed so often; also when all was over."""
    started: list[subprocess.Popen] = []
    given = [f"--config.{name}={value}" for name, value in SETTINGS.items()]
    shared = ["--config=configs/dense.py:tiny,paper", *given, f"--workdir={workdir}"]
    environment = {**os.environ, "CI": "true", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    environment["PJRT_NPROC"] = "1"

    with reserved_port() as port:

        def start(module: str, *more: str) -> subprocess.Popen:
            at = f"--{'listen' if module.endswith('syncer') else 'syncer'}=127.0.0.1:{port}"
            command = [sys.executable, "-m", module, *shared, at, *more]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))
            return started[-1]

        try:
            start("experiments.syncer")
            start("experiments.learner", "--learner_id=1")
            hosts = Hosts(start)

            def stepping(since: float, chips: int | None) -> float:
                """The first moment after `since` at which the learner stepped with so many hosts."""
                found: list[float] = []

                def look() -> bool:
                    hosts.look()
                    found.extend(
                        line["time"]
                        for line in read_values(workdir / "states.jsonl")
                        if line["learner"] == 0
                        and (line["state"], line["chips"]) == ("stepping", chips)
                        and line["time"] > since
                    )
                    return bool(found)

                _until(look)
                return found[0]

            def rest(until: float) -> None:
                _until(lambda: hosts.look() or time.time() > until)

            stepping(0.0, None)
            outages = []
            for _ in range(count):
                rest(time.time() + seconds)
                hosts.away, killed = True, time.time()
                hosts.processes[1].kill()
                alone = stepping(killed, 1)
                rest(killed + seconds)
                hosts.away = False
                together = stepping(time.time(), None)
                steps = read_values(workdir / "learners" / "0" / "steps.jsonl")
                stopped = max(line["time"] for line in steps if line["time"] < together)
                outages.append(Outage(killed, alone, stopped, together))
            rest(time.time() + seconds)
            return outages, time.time()
        finally:
            for process in started:
                process.kill()
                process.wait()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not happen within {TIMEOUT:g} s")
        time.sleep(0.05)
