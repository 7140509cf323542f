"""The models by name: a new one is a file in this package that ends with its `MODEL`."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from ddiloco.models.model import Model


def find_models() -> dict[str, Model]:
    """The `MODEL` of each file of this package that has one, by the file's name."""
    names = sorted(file.name for file in pkgutil.iter_modules(__path__))
    files = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: file.MODEL for name, file in files.items() if hasattr(file, "MODEL")}


MODELS: dict[str, Model] = find_models()


def model_of(config: Any) -> Model:
    """The model that these settings belong to; raises TypeError if there is none."""
    for model in MODELS.values():
        if type(config) is model.config:
            return model
    raise TypeError(f"{type(config).__name__} is not the settings of a model; there are {', '.join(MODELS)}")
