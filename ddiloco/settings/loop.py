"""The settings `config.model` of a run that trains the user's own loop instead of a built-in model."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddiloco.config import setting

NAME = "loop"  # instead of a model's name


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How every process of the run makes the loop."""

    factory: str = setting("", "module:function or file.py:function that makes a ddiloco.Loop")
    settings: Any = setting(None, "what the function gets by name, besides its place")

    def __post_init__(self) -> None:
        if not all(part for part in self.factory.rpartition(":")):
            raise ValueError(f"factory: is {self.factory!r}, but must be module:function or file.py:function")
        if self.settings is not None and not hasattr(self.settings, "items"):
            raise ValueError(f"settings: is {self.settings!r}, but is a group of settings")
        object.__setattr__(self, "settings", dict((self.settings or {}).items()))
