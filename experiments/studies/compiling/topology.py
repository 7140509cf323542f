"""The devices of a TPU slice that is not there, for which libtpu compiles."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import sys
from typing import NamedTuple

import jax
from jax.experimental import topologies

from ddiloco.training.chips import CHIPS, Chip
from ddiloco.training.platform import compute_on_cpu
from experiments.cli.program import UsageError

HERE = "here"
_APART = pathlib.Path(sys.prefix) / "tpu_compiler/libtpu/libtpu.so"  # scripts/environment.sh puts it there
_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*)*(_twisted|_untwisted)?")  # libtpu ends the process at a side of 0
# What libtpu would ask the metadata server of a machine with TPUs, where any type will do.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compilers, unlike programs on the chips, may run side by side
}


class Slice(NamedTuple):
    """One learner's devices, of one slice or of several; `chip` is None where they are no TPUs."""

    devices: list[jax.Device]
    chip: Chip | None


def slice_of(topology: str, slices: int = 1) -> Slice:
    """The devices of slices such as `v5p:4x4x4`, or of this process: `here`; may raise UsageError."""
    if topology == HERE:
        devices = jax.devices()
        kinds = {chip.kind: chip for chip in CHIPS.values()}
        return Slice(devices, kinds.get(devices[0].device_kind))
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS or not _SHAPE.fullmatch(shape):
        known = ", ".join(CHIPS)
        problem = f"must be one of {known}, a colon and the slice's shape, such as v5p:4x4x4, or {HERE}"
        raise UsageError(f"topology: is {topology}, but {problem}")
    if not has_compiler():
        raise UsageError(
            "topology: needs libtpu, the TPU compiler, which is not installed; "
            "pip install 'ddiloco[tpu_compiler]'"
        )
    _prepare()
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"topology: is {topology}: {str(error).splitlines()[0]}") from None
    return Slice(list(found.devices), CHIPS[kind])


def has_compiler() -> bool:
    """Whether libtpu is installed, in the environment or beside it."""
    return (
        _APART.is_file() or importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
    )


def _prepare() -> None:
    """Sets up this process, in which JAX itself uses the CPU."""
    compute_on_cpu()
    os.environ.pop("XLA_FLAGS", None)  # libtpu ends the process at a flag that it does not know
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("libtpu") is None:
        os.environ.setdefault("TPU_LIBRARY_PATH", str(_APART))
