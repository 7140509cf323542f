"""The settings `config.model` of a run that trains the user's own loop instead of a built-in model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ddiloco.config import setting

NAME = "loop"  # instead of a model's name


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The user's loop, as every process of the run makes it."""

    factory: str = setting("", "module:function or file.py:function that makes a ddiloco.Loop")
    settings: Any = setting(None, "keyword arguments of the function, besides its place")

    def __post_init__(self) -> None:
        if not all(part for part in self.factory.rpartition(":")):
            raise ValueError(f"factory: is {self.factory!r}, but must be module:function or file.py:function")
        if self.settings is not None and not hasattr(self.settings, "items"):
            raise ValueError(f"settings: is {self.settings!r}, but is a group of settings")
        try:
            settings = _json(self.settings or {})
            json.dumps(settings)
        except TypeError as error:
            raise ValueError(f"settings: must be values that JSON has: {error}") from None
        object.__setattr__(self, "settings", settings)


def _json(value: Any) -> Any:
    """The value as every process has it, also one that reads it from `config.json`."""
    if hasattr(value, "items"):
        return {str(name): _json(one) for name, one in value.items()}
    return [_json(one) for one in value] if isinstance(value, list | tuple) else value
