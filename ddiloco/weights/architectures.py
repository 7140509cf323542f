"""The counterpart in transformers of each model that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.models import MODELS
from ddiloco.weights.counterpart import Counterpart
from ddiloco.weights.qwen3 import dense, moe
from ddiloco.weights.vit import vit

COUNTERPARTS: dict[str, Callable[[Any], Counterpart]] = {
    "dense": dense,
    "moe": moe,
    "vit": vit,
}


def counterpart_of(config: Any) -> Counterpart:
    """The counterpart of a model with these settings; raises ConfigError if there is none."""
    for name, make in COUNTERPARTS.items():
        if type(config) is MODELS[name].config:
            return make(config)
    problem = f"{type(config).__name__} has no counterpart in transformers"
    raise ConfigError(f"config.model: {problem}; {', '.join(COUNTERPARTS)} have one")
