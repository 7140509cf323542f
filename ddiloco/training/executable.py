"""A learner's compiled step as a file: one machine without accelerators compiles for a whole fleet."""

from __future__ import annotations

import hashlib
import json
import pathlib
import pickle
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from ddiloco.config import ConfigError

_MAGIC = b"ddiloco executable 1\n"


def save(path: pathlib.Path, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, mesh: Mesh) -> None:
    """Writes the compiled program; raises OSError where it cannot."""
    executable, *trees = serialize_executable.serialize(compiled)
    body = pickle.dumps((executable, *trees))
    header = json.dumps({**_described(lowered, mesh), "bytes": len(body)}).encode()
    path.write_bytes(_MAGIC + header + b"\n" + body)


def load(path: pathlib.Path, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled program for the mesh. It is code: load only what you have saved.

    Raises:
      ConfigError: the file cannot be read, or is of another program, other devices or another version of JAX.
    """
    name = f"config.train.executable: {path}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{name}: was not written by experiments.compile --save")
    header, _, body = content.removeprefix(_MAGIC).partition(b"\n")
    wanted = _described(lowered, mesh)
    try:
        found = json.loads(header)
        whole = found["bytes"] == len(body)
    except (ValueError, KeyError):
        whole = False
    if not whole:
        raise ConfigError(f"{name}: is not complete; compile it again, or set None")
    for what in wanted:
        if found.get(what) != wanted[what]:
            pair = f"{found.get(what)}, but this learner's is {wanted[what]}"
            problem = (
                "the program differs in code or settings" if what == "program" else f"its {what} is {pair}"
            )
            raise ConfigError(f"{name}: {problem}; compile it again, or set None")
    devices = list(mesh.devices.flat)
    serialized, in_tree, out_tree = pickle.loads(body)
    return serialize_executable.deserialize_and_load(
        serialized, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
    )


def _described(lowered: jax.stages.Lowered, mesh: Mesh) -> dict[str, Any]:
    """Properties that must be the same where the program is compiled and where it runs; JSON values."""
    devices = mesh.devices.flat
    return {
        "jax": jax.__version__,
        "chip": devices[0].device_kind,
        "mesh": dict(mesh.shape),
        "devices": [device.id for device in devices],
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
