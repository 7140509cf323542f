"""The table of simulated cells."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.front import tables
from experiments.front.tables import number
from experiments.studies.goodput.simulator import Cell


def table(cells: Sequence[Cell]) -> str:
    """The cells as lines of text, in percent; causes that cost nothing anywhere are left out."""
    causes = [cause for cause in cells[0].lost if any(cell.lost[cause] for cell in cells)]
    quorum = ["quorum"] if any(cell.quorum_uptime is not None for cell in cells) else []
    rows = [
        [
            cell.label,
            f"{cell.num_chips:,}",
            f"{cell.goodput:.2%}",
            number(cell.ci95 and 100 * cell.ci95, ".2f"),
            f"{cell.uptime:.2%}",
            *(number(cell.quorum_uptime, ".2%") for _ in quorum),
            *(f"{cell.lost[cause]:.2%}" for cause in causes),
        ]
        for cell in cells
    ]
    return tables.columns(["system", "chips", "goodput", "+-", "uptime", *quorum, *causes], rows)
