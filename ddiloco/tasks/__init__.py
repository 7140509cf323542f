"""Tasks by name: a new one is a file of that name in this package, and the name of its class below."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ddiloco.config import ConfigError

if TYPE_CHECKING:
    from ddiloco.tasks.task import Task

TASKS = {
    "language_modelling": "LanguageModelling",
    "classification": "Classification",
    "captioning": "Captioning",
}


def task_class(name: str) -> type[Task]:
    """The class of a task; its file is imported now, with the data pipelines that it needs.

    Raises:
      ConfigError: there is none of that name.
    """
    if name not in TASKS:
        raise ConfigError(f"MODEL.task: is {name!r}, but must be one of {', '.join(TASKS)}")
    found: type[Task] = getattr(importlib.import_module(f"{__name__}.{name}"), TASKS[name])
    return found
