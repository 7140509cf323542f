"""Tasks by name: a new one is a file in this package and a line in `TASKS`."""

from __future__ import annotations

from ddiloco.tasks.captioning import Captioning
from ddiloco.tasks.classification import Classification
from ddiloco.tasks.language_modelling import LanguageModelling
from ddiloco.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "language_modelling": LanguageModelling,
    "classification": Classification,
    "captioning": Captioning,
}
