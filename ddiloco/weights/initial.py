"""The parameters that training begins from, where `init_from` names a folder or file of safetensors."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.training.parameters import parameter_shapes
from ddiloco.weights.architectures import counterpart_of
from ddiloco.weights.counterpart import CONFIG, Shape, Table
from ddiloco.weights.files import Files


class InitialWeights(Mapping[str, np.ndarray]):
    """Parameters by layer, float32; each is read when it is asked for, and only the last is kept."""

    def __init__(self, config: Any, path: pathlib.Path) -> None:
        """Reads headers alone; raises ConfigError if they are not of a model with these settings."""
        counterpart = counterpart_of(config)
        counterpart.check(path.parent if path.is_file() else path)
        self._table, self._shapes, self._files = counterpart.table, parameter_shapes(config), Files(path)
        _check_shapes(path, self._table, self._files.shapes)
        self._newest = functools.lru_cache(1)(self._read)  # several pieces of a tensor are asked for in turn

    def __getitem__(self, name: str) -> np.ndarray:
        return self._newest(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def check(self) -> None:
        """Reads every tensor once, which takes an eighth of the time that making all parameters does.

        Raises:
          ConfigError: one holds numbers that are not finite, or is no copy of the one that it is tied to.
        """
        for found in self._table.ours.values():
            for theirs in found.theirs:
                self._files.read(theirs)
        for copy, of in self._table.copies.items():
            exists = copy in self._files.shapes
            if exists and not np.array_equal(self._files.read(copy), self._files.read(of)):
                problem = f"{copy} differs from {of}, to which tie_word_embeddings in {CONFIG} ties it"
                raise ConfigError(f"config.init_from: {self._files.file(copy)}: {problem}")

    def _read(self, name: str) -> np.ndarray:
        found = self._table.ours[name]
        return np.ascontiguousarray(found.make(*map(self._files.read, found.theirs)))


def named_parameters(shapes: Mapping[str, Shape], path: pathlib.Path) -> dict[str, np.ndarray]:
    """Parameters by the names that a user's loop has for them, float32, from safetensors in a folder or file.

    Raises:
      ConfigError: one is missing, of another shape or not finite, or there are others.
    """
    files = Files(path)
    for name in sorted(shapes.keys() | files.shapes.keys()):
        own, found = shapes.get(name), files.shapes.get(name)
        if own is None or found is None:
            problem = (
                f"has no tensor {name}" if found is None else f"has a tensor {name}, which the loop has not"
            )
        elif tuple(own) != tuple(found):
            problem = f"{name} has shape {tuple(found)}, but must have {tuple(own)}"
        else:
            continue
        raise ConfigError(f"config.init_from: {path}: {problem}")
    return {name: files.read(name) for name in shapes}


def _check_shapes(path: pathlib.Path, table: Table, found: Mapping[str, Shape]) -> None:
    wanted = {name: theirs.shape for name, theirs in table.theirs.items()}
    wanted |= {copy: wanted[of] for copy, of in table.copies.items() if copy in found}
    for name in [*wanted, *sorted(found.keys() - table.ignored)]:
        if name not in found:
            problem = f"has no tensor {name}"
        elif name not in wanted:
            problem = f"has a tensor {name}, which the model has not"
        elif found[name] != wanted[name]:
            problem = f"{name} has shape {found[name]}, but must have {wanted[name]}"
        else:
            continue
        raise ConfigError(f"config.init_from: {path}: {problem}")
