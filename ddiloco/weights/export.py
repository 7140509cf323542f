"""Writes a model as a folder that transformers reads: weights, settings and tokenizer."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig
from ddiloco.settings.experiment import Experiment
from ddiloco.storage import array_file
from ddiloco.weights.architectures import counterpart_of
from ddiloco.weights.counterpart import CONFIG
from ddiloco.weights.files import SHARD_BYTES, Tensor, write
from ddiloco.weights.table import Theirs
from ddiloco.weights.tokenizer import tokenizer_files


def export(
    experiment: Experiment,
    params: Mapping[str, np.ndarray],
    folder: pathlib.Path,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Writes the parameters, by layer, into the folder, new or empty; `config.json` is written last.

    Beside the parameters there is one tensor in memory at a time.

    Returns:
      What has no counterpart, a line each; the logits have one.

    Raises:
      ConfigError: transformers has no architecture that computes the same; the message is one line.
      OSError: the disk refuses.
    """
    found = counterpart_of(experiment.model)
    if found.differences:
        raise ConfigError(f"config.{'; '.join(found.differences)}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [
        Tensor(name, theirs.shape, functools.partial(_made, params, theirs))
        for name, theirs in found.table.theirs.items()
    ]
    write(folder, tensors, shard_bytes)
    more: dict[str, Any] = {}
    lines: list[str] = []
    if isinstance(experiment.data, DataConfig):
        files, more, lines = tokenizer_files(experiment.data)
        for name, content in files.items():
            array_file.replace(folder / name, [content])
    more |= {"architectures": [found.architecture], "dtype": "float32", "torch_dtype": "float32"}
    for name in reversed(found.files):
        entries = {**found.entries(name), **(more if name == CONFIG else {})}
        array_file.replace(folder / name, [json.dumps(entries, indent=2).encode() + b"\n"])
    return lines


def _made(params: Mapping[str, np.ndarray], theirs: Theirs) -> np.ndarray:
    if theirs.ours is None:
        return np.zeros(theirs.shape, np.float32)
    return theirs.make(np.asarray(params[theirs.ours], np.float32))
