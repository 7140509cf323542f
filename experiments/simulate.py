"""Simulates goodput: `python -m experiments.simulate --config=configs/goodput.py --output=FILE.json`.

Prints a table. With --output also writes FILE.json and, beside it, FILE_goodput.png, FILE_attribution.png and
FILE_uptime.png.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

from absl import flags

from experiments.front import cli

_CONFIG = cli.define_config("configs/goodput.py")
_OUTPUT = flags.DEFINE_string("output", None, "Write the figures to this JSON file, and pictures beside it.")


def main(_) -> int:
    from ddiloco.config import build, to_dict
    from experiments.studies.goodput import figures as plots
    from experiments.studies.goodput.simulator import Simulation, simulate

    simulation = build(Simulation, _CONFIG.value)
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    if output is not None:
        _check(output)
    live = sys.stdout.isatty() and os.environ.get("CI", "") != "true"
    cells = simulate(simulation, _show_progress if live else lambda share: None)
    if live:
        print("\r\033[K", end="")
    print(table(cells))
    if output is not None:
        text = json.dumps(
            {"cells": [cell.as_json() for cell in cells], "settings": to_dict(simulation)}, indent=2
        )
        output.write_text(text + "\n")
        paths = plots.draw_all(output.with_suffix(""), cells)
        print("  ".join(map(str, [output, *paths])))
    return 0


def table(cells) -> str:
    """The cells as lines of text, in percent; causes that cost nothing anywhere are left out."""
    causes = [cause for cause in cells[0].lost if any(cell.lost[cause] for cell in cells)]
    quorum = any(cell.quorum_uptime is not None for cell in cells)
    names = ["system", "chips", "goodput", "+-", "uptime", *(["quorum"] if quorum else []), *causes]
    rows = [names]
    for cell in cells:
        ci95 = "-" if cell.ci95 is None else f"{100 * cell.ci95:.2f}"
        shown = [] if not quorum else ["-" if cell.quorum_uptime is None else f"{cell.quorum_uptime:.2%}"]
        lost = [f"{cell.lost[cause]:.2%}" for cause in causes]
        figures = [f"{cell.goodput:.2%}", ci95, f"{cell.uptime:.2%}", *shown, *lost]
        rows.append([cell.label, f"{cell.num_chips:,}", *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _check(output: pathlib.Path) -> None:
    """That the figures can be written, before they are made."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        new = not output.exists()
        with output.open("a"):
            pass
        if new:
            output.unlink()
    except OSError as error:
        raise cli.UsageError(f"output: {output}: {error.strerror}") from None


def _show_progress(share: float) -> None:
    print(f"\rsimulated {share:4.0%}", end="", flush=True)


if __name__ == "__main__":
    cli.run(main)
