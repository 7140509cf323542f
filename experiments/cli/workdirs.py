"""The folders of runs that a command looks at."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from experiments.cli import program

MAX_RUNS = 16  # runs on one page


def runs_in(folders: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The folders that are runs, and the runs in those that are not: of a sweep, or of a comparison's rows.

    Raises:
      UsageError: one has no run in it, or they are too many for one page.
    """
    found: list[pathlib.Path] = []
    for folder in folders:
        inside = sorted(folder.glob("*/config.json")) or sorted(folder.glob("*/*/config.json"))
        runs = [folder] if (folder / "config.json").exists() else [path.parent for path in inside]
        if not runs:
            raise program.UsageError(f"workdir: {folder}: there is no run in it")
        found += runs
    if len(found) > MAX_RUNS:
        raise program.UsageError(f"workdir: names {len(found)} runs, but must name {MAX_RUNS} at most")
    return found
