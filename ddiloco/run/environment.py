"""The environment of a run: versions and hardware, in `environment.json`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterable

from ddiloco.telemetry.files import write_json

FILE = "environment.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grpcio", "libtpu")


def write_environment(workdir: pathlib.Path, devices: Iterable[str]) -> None:
    """Writes the file; `devices`: the kinds of those that learners of this process have. Raises OSError."""
    found = {
        "python": platform.python_version(),
        "packages": installed(_PACKAGES),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "devices": sorted(devices),
    }
    write_json(workdir / FILE, found)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
