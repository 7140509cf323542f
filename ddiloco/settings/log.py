"""The settings `config.log`: how a run is seen."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting
from ddiloco.observe.writers import NEEDS


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """How much is logged during training."""

    every: int = setting(4, "steps between two points of a learner's curves", at_least=1)
    writers: tuple[str, ...] = setting(
        ("tensorboard",), "where curves go; the page draws its own", choices=tuple(NEEDS)
    )
    json: bool = setting(False, "whether processes print JSON, a line an object, with what it is about")
    peak_flops: float | None = setting(
        None, "operations a second of one device, of which MFU is a share; None: by its kind", above=0.0
    )
    page: str = setting(
        "127.0.0.1:7071",
        "HOST:PORT of the run's page; on the loopback another port if it is taken; '': none",
    )
