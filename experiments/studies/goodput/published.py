"""The paper's table of goodput, in percent, at one year between interruptions of a chip."""

from __future__ import annotations

CHIPS = (150_000, 300_000, 1_200_000)

GOODPUT_PERCENT: dict[str, tuple[int, ...]] = {
    "data_parallel": (72, 57, 27),
    "elastic_data_parallel": (88, 80, 58),
    "decoupled:2": (94, 88, 70),
    "decoupled:4": (96, 93, 82),
    "decoupled:8": (98, 96, 88),
    "decoupled:16": (99, 98, 93),
}


def published(system: str, num_chips: int) -> int | None:
    """The table's goodput (percent) of a system, named as in `systems`; None: no such cell."""
    cells = dict(zip(CHIPS, GOODPUT_PERCENT.get(system, ()), strict=False))
    return cells.get(num_chips)
