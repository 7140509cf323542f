"""Decoupled DiLoCo: many independent learners and one syncer pre-train one model.

`ddiloco.train` trains a `ddiloco.Loop` of your own, `ddiloco.diloco` wraps an optimizer in one process
(docs/your_own.md). Importing the package imports neither JAX nor anything of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddiloco.dashboard.notebook import Page
    from ddiloco.from_python import RunError, Trained, train
    from ddiloco.outer.diloco import diloco
    from ddiloco.training.loop import Loop, Place

__all__ = ["Loop", "Page", "Place", "RunError", "Trained", "diloco", "train"]

_FROM = {
    "Loop": "ddiloco.training.loop",
    "Page": "ddiloco.dashboard.notebook",
    "Place": "ddiloco.training.loop",
    "diloco": "ddiloco.outer.diloco",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FROM.get(name, "ddiloco.from_python")), name)
