"""The starts of a process on its node, to detect one that its engine restarts there again and again."""

from __future__ import annotations

import json
import os
import pathlib
import socket

from ddiloco.storage import array_file
from ddiloco.telemetry.files import read_json

MANY = 5  # starts
WITHIN = 1800.0  # seconds


def node() -> str:
    """The node's name: as the engine gives it, since a container has another hostname, or the hostname."""
    return os.environ.get("DDILOCO_NODE") or socket.gethostname()


def record_start(path: pathlib.Path, now: float) -> str | None:
    """Adds a start to the file; a sentence if there were many on this node lately, else None.

    Args:
      path: a file of this process alone, on the node's disk or on one that all nodes share.
      now: unix seconds.

    Raises:
      OSError: the disk refuses.
    """
    name, starts = node(), read_json(path)
    starts[name] = [*(time for time in starts.get(name, ()) if now - WITHIN < time <= now), now]
    path.parent.mkdir(parents=True, exist_ok=True)
    array_file.replace(path, [json.dumps(starts).encode()])
    count = len(starts[name])
    return f"started {count} times in {WITHIN / 60:.0f} minutes on node {name}" if count >= MANY else None
