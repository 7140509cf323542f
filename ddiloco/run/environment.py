"""What a run ran on: versions and hardware, in `environment.json`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterable

from ddiloco.observe.files import replacing

FILE = "environment.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grpcio", "libtpu")


def write_environment(workdir: pathlib.Path, devices: Iterable[str]) -> None:
    """Writes the file; `devices`: the kinds of those that learners of this process have. Raises OSError."""
    found = {
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "devices": sorted(devices),
    }
    with replacing(workdir / FILE) as new:
        new.write_text(json.dumps(found, indent=2) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
