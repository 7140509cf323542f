"""Files of safetensors: one, or above 5 GB several with an index, as is usual."""

from __future__ import annotations

import errno
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddiloco.arrays.finite import NotFiniteError, check_finite
from ddiloco.config import ConfigError
from ddiloco.storage import array_file
from ddiloco.telemetry.records import reason
from ddiloco.weights.counterpart import Shape

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of the tensors in a file, at most
_READ = ("F32", "BF16", "F16")


class Tensor(NamedTuple):
    """A float32 tensor to be written; `array` makes it when its turn comes."""

    name: str
    shape: Shape
    array: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return 4 * math.prod(self.shape)


def write(folder: pathlib.Path, tensors: Sequence[Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the tensors into the necessary number of files, with those of one file in memory at a time.

    Raises:
      OSError: the disk refuses.
    """
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = MODEL if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        try:
            save_file({tensor.name: _float32(tensor) for tensor in shard}, folder / name, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, reason(error), str(folder / name)) from None
        array_file.make_durable(folder / name)
        where |= {tensor.name: name for tensor in shard}
    if count > 1:
        index = {"metadata": {"total_size": sum(t.bytes for t in tensors)}, "weight_map": where}
        array_file.replace(folder / INDEX, [json.dumps(index, indent=2).encode()])


def _shards(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _float32(tensor: Tensor) -> np.ndarray:
    array = np.ascontiguousarray(tensor.array(), np.dtype("<f4"))
    if array.shape != tensor.shape:
        raise ValueError(f"{tensor.name} has shape {array.shape}, but must have {tensor.shape}")
    return array


class Files:
    """The tensors in a folder, or in one file; each is read when it is asked for.

    Attributes:
      shapes: of all tensors, by name.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the headers; `path`: a folder or a file. Raises ConfigError if it cannot."""
        self._files: dict[str, Any] = {}
        self._paths: dict[str, pathlib.Path] = {}
        self.shapes: dict[str, Shape] = {}
        for file in _files(path):
            try:
                opened = safe_open(file, framework="np")
            except (OSError, SafetensorError) as error:
                raise _unreadable(file, error) from None
            for name in opened.keys():  # noqa: SIM118, since it is no mapping
                if name in self._files:
                    problem = f"{name} is in {self._paths[name].name} and in {file.name}"
                    raise ConfigError(f"config.init_from: {path}: {problem}; it must be in one of them")
                self._files[name], self._paths[name] = opened, file
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32.

        Raises:
          ConfigError: it has another kind of numbers, or some that are not finite, or cannot be read.
        """
        path = self._paths[name]
        try:
            dtype = self._files[name].get_slice(name).get_dtype()
            if dtype not in _READ:
                problem = f"{name} is of {dtype}, but must be of {', '.join(_READ)}"
                raise ConfigError(f"config.init_from: {path}: {problem}")
            tensor = np.asarray(self._files[name].get_tensor(name), np.float32)
            check_finite([(name, tensor)])
            return tensor
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from None
        except NotFiniteError as error:
            raise ConfigError(f"config.init_from: {path}: {error}") from None

    def file(self, name: str) -> pathlib.Path:
        """The file with the tensor."""
        return self._paths[name]


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if (path / MODEL).exists() or not index.exists():  # transformers prefers it, too
        return [path / MODEL]
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        return [path / name for name in sorted(set(where.values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(index, error) from None


def _unreadable(path: pathlib.Path, error: Exception) -> ConfigError:
    return ConfigError(f"config.init_from: {path}: cannot be read: {reason(error)}")
