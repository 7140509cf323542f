"""How a syncer of S processes scales, what each stage of one reaches of its physical limit, and its memory.

Real processes, sockets and disk; learners play traffic without training, M = 8 as a 9B run has it, in
fragments that this machine has room for. The syncer's processes are pinned to one core, learners to the
others.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ddiloco.arrays.host_memory import aligned_empty
from ddiloco.run.resources import syncer_needs
from experiments.bench.measuring import another_process, medians, receive_from, row
from experiments.bench.syncer_processes import PlayedRun, PlayedTraffic, assembly_of, play

SHARDS = (1, 2, 4)
CODECS = (("int4", "int4"), ("int4", "int8"), ("f32", "f32"))
"""Up and down."""
TURNS = 2 * max(SHARDS)
"""Each process that merges has one of so many turns of the core, also where it is the only one.

So S processes have S times the processor of one, and none takes it from another, on any machine of two cores.
"""


def run(quick: bool = False) -> list[dict]:
    """Measures fragments of 32 MiB for the stages and 8 MiB for S (`quick`: 64 KiB, and S = 2 alone).

    Returns:
      By codecs up and down: rows of the stages of one process, whose rounds follow one another, in GB/s of
      what each moves, with the limit that was measured in the same run; of those that use a processor also in
      GB a core-second, which other work on the machine does not change. Then a row for each S, with rounds in
      flight, in GB/s of float32 merged, `reference` that of S=1, `limit` S times that. All with the processor
      milliseconds a round by process and purpose, and with the bytes that learners moved and should move.
    """
    core = min(os.sched_getaffinity(0))
    limits = _limits(core, 1 << 20, 2) if quick else _limits(core, 64 << 20, 9)
    rows, steps = (16, 48) if quick else (2048, 72)
    found = []
    for codecs in CODECS[:1] if quick else CODECS:
        name = "/".join(codecs)
        in_turn = PlayedTraffic(1, rows, *codecs, 0, steps, core)
        if not quick:
            in_turn = dataclasses.replace(in_turn, rows=8192, fragments=6, steps=36)
        found += _stages(name, *_play(in_turn), limits)
        if codecs in CODECS[:1]:
            scaled = [
                PlayedTraffic(s, rows, *codecs, 16, steps, core, TURNS) for s in ((2,) if quick else SHARDS)
            ]
            found += _scaling(name, [_play(traffic) for traffic in scaled])
    return found


def _play(traffic: PlayedTraffic) -> tuple[PlayedTraffic, PlayedRun]:
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        return traffic, play(traffic, pathlib.Path(folder) / "syncer")


def _stages(name: str, traffic: PlayedTraffic, run: PlayedRun, limits: dict[str, float]) -> list[dict]:
    size, learners = traffic.fragment_bytes, traffic.learners
    up, down = run.planned
    moved = {
        "receive": (up / run.num_rounds, "socket"),
        "merge": (learners * size, "copy"),
        "disk": (traffic.durable_bytes, "disk"),
        "broadcast": ((down - learners * traffic.fragments * size) / run.num_rounds, "socket"),
    }
    seconds: dict[str, list[float]] = {stage: [] for stage in moved}
    for values in run.rounds:
        key, ended = (values["step"], values["fragment"]), values["time"]
        if key not in run.received or key not in run.sent:  # a last round, whose learners have left
            continue
        worked = values["merge_seconds"] + values["disk_seconds"]
        seconds["merge"].append(values["merge_seconds"])
        seconds["disk"].append(values["disk_seconds"])
        seconds["receive"].append(ended - worked - run.sent[key])
        seconds["broadcast"].append(run.received[key] - ended)
    found = []
    for stage, (size_moved, limit) in moved.items():
        rate = size_moved / statistics.median(seconds[stage]) / 1e9
        found.append(
            row(f"{name} {stage}", rate, limits[limit], limits[limit], "GB/s", **_more(traffic, run))
        )
    both_ways = moved["receive"][0] + moved["broadcast"][0]
    for purpose, size_moved, limit in (
        ("exchange", both_ways, "socket"),
        ("merge", moved["merge"][0], "copy"),
    ):
        rate = size_moved * len(run.rounds) / run.processors["syncer"][purpose] / 1e9
        of = limits[f"{limit} a core-second"]
        found.append(
            row(f"{name} {purpose}, processor", rate, of, of, "GB a core-second", **_more(traffic, run))
        )
    return found


def _scaling(name: str, scaled: list[tuple[PlayedTraffic, PlayedRun]]) -> list[dict]:
    payload = {t.shards: r.rate * t.learners * t.fragment_bytes / 1e9 for t, r in scaled}
    first = payload[min(payload)]
    return [
        row(f"{name} S={t.shards}", payload[t.shards], first, t.shards * first, "GB/s", **_more(t, r))
        for t, r in scaled
    ]


def _more(traffic: PlayedTraffic, run: PlayedRun) -> dict[str, Any]:
    rounds = len(run.rounds)
    spent = {
        f"{process}_{purpose}_ms_a_round": 1e3 * seconds / rounds
        for process, purposes in run.processors.items()
        for purpose, seconds in purposes.items()
    }
    moved = {"bytes_moved": run.moved, "bytes_planned": run.planned}
    return {"rounds_a_second": run.rate, "fragment_bytes": traffic.fragment_bytes, **moved, **spent}


def _limits(core: int, size: int, repetitions: int) -> dict[str, float]:
    """GB/s on this core of a copy in memory, bytes written and synced, and bytes from a raw socket.

    Of copy and socket also GB a core-second.
    """
    sent = np.ones(size, np.uint8)
    with another_process(_limits_on, core, size, repetitions) as pipe:
        with socket.create_connection(receive_from(pipe)) as raw:
            while receive_from(pipe) == "send":
                raw.sendall(sent)
        return receive_from(pipe)


def _limits_on(pipe: Connection, core: int, size: int, repetitions: int) -> None:
    os.sched_setaffinity(0, {core})
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    listening = socket.create_server(("127.0.0.1", 0))
    pipe.send(listening.getsockname())
    raw, _ = listening.accept()
    core_seconds: dict[str, list[float]] = {"copy": [], "socket": []}

    def take() -> None:
        pipe.send("send")
        begun = time.process_time()
        receive(raw, size)
        core_seconds["socket"].append(time.process_time() - begun)

    def copy() -> None:
        begun = time.process_time()
        np.copyto(target, source)
        core_seconds["copy"].append(time.process_time() - begun)

    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        path = pathlib.Path(folder) / "plain"
        candidates = {
            "copy": copy,
            "disk": lambda: write(path, [source, source], synced=True),
            "socket": take,
        }
        seconds = medians(candidates, repetitions)
    pipe.send("over")
    moved = {"copy": size, "disk": 2 * size, "socket": size}
    found = {name: moved[name] / seconds[name] / 1e9 for name in candidates}
    for name, spent in core_seconds.items():
        found[f"{name} a core-second"] = size / statistics.median(spent) / 1e9
    pipe.send(found)


def receive(connection: socket.socket, size: int) -> memoryview:
    """So many bytes, in memory taken for them."""
    received = left = memoryview(aligned_empty((size,), np.uint8))
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the other end is closed")
        left = left[count:]
    return received


def write(path: pathlib.Path, buffers: list[np.ndarray], synced: bool) -> None:
    """Writes the arrays to a file; `synced`: until they are on the disk."""
    with path.open("wb") as file:
        for buffer in buffers:
            file.write(buffer.data)
        file.flush()
        if synced:
            os.fsync(file.fileno())


def run_memory(quick: bool = False) -> list[dict]:
    """Measures a syncer's process of a model of 256 MiB (`quick`: 12 MiB), P = 24, through three rounds of
    each fragment, of which three are in flight at a time; learners send over a real wire.

    Returns:
      A row for each codec of offers, f32 and int4, in MB over what the process has before it has a model:
      `measured` with M = 16, `reference` with M = 2, `limit` the model's bytes. `model_mb` too, and
      `needed_mb`, what --dry_run says with M = 16.
    """
    return [_memory(codec, 128 if quick else 2731) for codec in ("f32", "int4")]


def _memory(codec: str, rows: int) -> dict:
    few, many = (
        PlayedTraffic(1, rows, codec, "f32", overlap=2, steps=72, core=0, learners=learners)
        for learners in (2, 16)
    )
    assembly = assembly_of(many)
    size = sum(assembly.layout.bytes) / 1e6
    needed = syncer_needs(assembly.experiment, assembly.layout).most / 1e6
    peaks = [_play(traffic)[1].memory / 1e6 for traffic in (many, few)]
    name = "memory" if codec == "f32" else f"memory {codec}"
    return row(name, *peaks, size, "MB", model_mb=size, needed_mb=needed)
