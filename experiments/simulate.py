"""Simulates goodput: `python -m experiments.simulate --config=configs/goodput.py --output=FILE.json`.

Prints a table. With --output also writes FILE.json and, beside it, FILE_goodput.png, FILE_attribution.png and
FILE_uptime.png.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from ddiloco.telemetry.formatting import number
from experiments.cli import program
from experiments.cli.tables import markdown

if TYPE_CHECKING:
    from experiments.studies.goodput.simulator import Cell

_CONFIG = program.define_config("configs/goodput.py")
_OUTPUT = flags.DEFINE_string("output", None, "Write the figures to this JSON file, and pictures beside it.")


def main(_) -> int:
    from ddiloco.config import build, to_dict
    from experiments.studies import figures
    from experiments.studies.goodput.simulator import Simulation, simulate

    simulation = build(Simulation, _CONFIG.value)
    output = program.writable_file(_OUTPUT)
    live = sys.stdout.isatty()
    progress = lambda share: print(f"\rsimulated {share:4.0%}", end="", flush=True)  # noqa: E731
    cells = simulate(simulation, progress if live else lambda share: None)
    if live:
        print("\r\033[K", end="")
    print(_table(cells))
    if output is not None:
        result = {"cells": list(map(dataclasses.asdict, cells)), "settings": to_dict(simulation)}
        output.write_text(json.dumps(result, indent=2) + "\n")
        paths = figures.draw_goodput(output.with_suffix(""), cells)
        print("  ".join(map(str, [output, *paths])))
    return 0


def _table(cells: Sequence[Cell]) -> str:
    """The cells in percent; causes that cost nothing anywhere are left out."""
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
    return markdown(["system", "chips", "goodput", "+-", "uptime", *quorum, *causes], rows, align=True)


if __name__ == "__main__":
    program.run(main)
