"""Tables as commands print them, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(names: Sequence[str], rows: Iterable[Sequence[Any]], align: bool = False) -> str:
    """A Markdown table: its head, and rows of as many cells; `align` pads each column to one width."""
    lines = [[str(cell) for cell in line] for line in (names, *rows)]
    if align:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    head, *others = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(names), *others])
