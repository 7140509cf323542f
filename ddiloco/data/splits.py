"""What two splits of a TFDS data set have in common, by what their names say."""

from __future__ import annotations

import itertools
import math
import re
from typing import NamedTuple

_ALL = "all"  # TFDS' name of all splits together
_WHOLE = "whole"
_TERM = re.compile(r"([^\[\]]+)(?:\[(.*):(.*)\])?")
_EDGE = re.compile(r"(-?\d+)(\D*)")


class _Span(NamedTuple):
    name: str
    unit: str  # "%", "" for records, TFDS' "shard", or _WHOLE
    begin: float = 0.0
    end: float = math.inf

    def meets(self, other: _Span) -> bool:
        if self.name != other.name and _ALL not in (self.name, other.name):
            return False
        if _ALL in (self.name, other.name) or _WHOLE in (self.unit, other.unit):
            return True
        return self.unit == other.unit and self.begin < other.end and other.begin < self.end


def overlap(one: str, other: str) -> bool:
    """Whether the splits surely have records in common, such as `train[:90%]` and `train+test`.

    Spans of different units, such as percent and records, are not held against each other.
    """
    spans = [[_span(term) for term in split.split("+")] for split in (one, other)]
    return one == other or any(a.meets(b) for a, b in itertools.product(*spans) if a and b)


def _span(term: str) -> _Span | None:
    """What a term without `+` has; None: it is written in a way that is not known here."""
    found = _TERM.fullmatch(term.strip())
    if found is None:
        return None
    name, *sides = found.groups()
    if not any(sides):
        return _Span(name, _WHOLE)
    edges = [_EDGE.fullmatch(side) if side else None for side in sides]
    if any(side and not edge for side, edge in zip(sides, edges, strict=True)):
        return None
    unit = next(edge[2] for edge in edges if edge)
    begin, end = (float(edge[1]) if edge else at for edge, at in zip(edges, (0.0, math.inf), strict=True))
    if unit == "%":
        begin, end = (edge + 100 if edge < 0 else edge for edge in (begin, end))
    return None if min(begin, end) < 0 else _Span(name, unit, begin, end)
