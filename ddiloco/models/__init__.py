"""The models by name: a new one is a file in this package that ends with its `MODEL`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from ddiloco.models.model import Model


class _Models(Mapping[str, Model]):
    """The `MODEL` of each file that has one, by the file's name; a file is imported when it is asked for."""

    def __getitem__(self, name: str) -> Model:
        if not name.isidentifier() or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise KeyError(name)
        file = importlib.import_module(f"{__name__}.{name}")
        if not hasattr(file, "MODEL"):
            raise KeyError(name)
        return file.MODEL

    def __iter__(self) -> Iterator[str]:
        names = sorted(file.name for file in pkgutil.iter_modules(__path__))
        return (name for name in names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


MODELS: Mapping[str, Model] = _Models()


def name_of(config: Any) -> str:
    """The name of the model that these settings belong to; raises TypeError if there is none."""
    package, _, name = type(config).__module__.rpartition(".")
    if package != __name__ or name not in MODELS or MODELS[name].config is not type(config):
        known = ", ".join(MODELS)
        raise TypeError(f"{type(config).__name__} is not the settings of a model; there are {known}")
    return name


def model_of(config: Any) -> Model:
    """The model that these settings belong to; raises TypeError if there is none."""
    return MODELS[name_of(config)]
