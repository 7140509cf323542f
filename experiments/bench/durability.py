"""What durability costs a round: bytes a second to the disk, and rounds a second with and without it."""

from __future__ import annotations

import os
import pathlib
import tempfile
import threading
from collections.abc import Callable

import numpy as np

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.messages import RoundId
from ddiloco.storage.durable import DurableState
from experiments.bench.measuring import medians, row
from experiments.bench.merge import NUM_LEARNERS, offers


def run(quick: bool = False) -> list[dict]:
    """Measures a fragment of 64 MiB (`quick`: 4 MiB) in a temporary folder ($TMPDIR names the disk).

    Returns:
      Two rows. `durability`, GB/s of fragment and outer optimizer state (two arrays) made durable, with
      checksum and atomic rename; reference: the same bytes written plainly and synced; limit: the same bytes
      written plainly, not synced. `durable_round`, rounds a second of M = 8 merges that are made durable;
      reference: the same merges in memory alone; limit: as the reference.
    """
    shape = (256 if quick else 4096, 4096)
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        seconds = medians(_candidates(pathlib.Path(folder), shape), 3 if quick else 15)
    gigabytes = 2 * 4 * shape[0] * shape[1] / 1e9
    speed = {name: gigabytes / seconds[name] for name in ("commit", "synced", "written")}
    rounds = {name: 1 / seconds[name] for name in ("durable_round", "merge")}
    return [
        row("durability", speed["commit"], speed["synced"], speed["written"], "GB/s"),
        row("durable_round", rounds["durable_round"], rounds["merge"], rounds["merge"], "rounds/s"),
    ]


def _candidates(folder: pathlib.Path, shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    theta, sent = offers(shape)
    counts = [(24, 24_000)] * NUM_LEARNERS
    layout = fragment({"layers/0/kernel": shape}, 1, "balanced")
    model = GlobalModel(layout, {"layers/0/kernel": theta}, OuterConfig(merge="rda"), NUM_LEARNERS)
    durable = DurableState(folder / "durable", layout, lambda record: None, threading.Event())
    durable.begin(model)
    buffers = [theta, theta]

    def merge() -> None:
        model.merge(0, [(array,) for array in sent], counts)

    def durable_round() -> None:
        merge()
        durable.commit(RoundId(1, 0), model)

    return {
        "commit": lambda: durable.commit(RoundId(1, 0), model),
        "synced": lambda: write(folder / "plain", buffers, synced=True),
        "written": lambda: write(folder / "plain", buffers, synced=False),
        "merge": merge,
        "durable_round": durable_round,
    }


def write(path: pathlib.Path, buffers: list[np.ndarray], synced: bool) -> None:
    """Writes the arrays to a file; `synced`: until they are on the disk."""
    with path.open("wb") as file:
        for buffer in buffers:
            file.write(buffer.data)
        file.flush()
        if synced:
            os.fsync(file.fileno())
