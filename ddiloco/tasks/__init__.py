"""Tasks by name: a new one is a file of that name in this package, and the name of its class below."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddiloco.tasks.task import Task

_CLASSES = {
    "language_modelling": "LanguageModelling",
    "classification": "Classification",
    "captioning": "Captioning",
}


class _Tasks(Mapping[str, "type[Task]"]):
    """A task's file, with the data pipelines that it needs, is imported when the task is asked for."""

    def __getitem__(self, name: str) -> type[Task]:
        task = _CLASSES[name]  # before the import, so that an unknown one is a KeyError
        return getattr(importlib.import_module(f"{__name__}.{name}"), task)

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


TASKS: Mapping[str, type[Task]] = _Tasks()
