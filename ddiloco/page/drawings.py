"""What is drawn: lanes of states, and curves over time, as paths of an SVG that stretches with the page.

Labels are text of the page beside the drawing, so that they stay readable at any width. What colour says is
said by form too: a lane's states differ in height and hatching, curves in their dashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.observe.words import amount
from ddiloco.page.timeline import Span
from ddiloco.page.view import RunView, Values

WIDTH, HEIGHT = 1000, 200
STATES = {
    "stepping": (1, 18, "steps"),
    "waiting": (10, 9, "waits for peers or network"),
    "recovering": (1, 18, "starts, joins or recovers"),
    "spare": (15, 4, "spare"),
    "hung": (1, 18, "hangs, or is not heard"),
    "dead": (8, 4, "dead"),
    "finished": (17, 2, "has finished"),
}
"""Of a lane's states: top, height, and what it means."""

HOST_STATES = {"connected": (5, 14, "host connected"), "gone": (11, 3, "host not connected")}

_FORMS = STATES | HOST_STATES
_MERGED = (22, 6)  # top and height of the strip below, which shows the share of merges that it was in
COLOURS = 8


class Line(NamedTuple):
    """A curve: `place` is its colour and dashes, None for one of many in grey, -1 for the global model."""

    label: str
    xs: Sequence[float]
    ys: Values
    place: int | None = None


class Curve(NamedTuple):
    """A line as it is drawn."""

    label: str
    path: str
    look: str  # its class in page.css


class Chart(NamedTuple):
    """Curves with their axes; `content.html` draws it."""

    title: str
    unit: str
    x: str  # what it is over, if not over time
    end: float
    ticks: Sequence[float]
    curves: Sequence[Curve]
    named: Sequence[Curve]  # those that the legend has
    in_words: str


def forms(spans: Sequence[Span], end: float) -> list[tuple[str, str]]:
    """The states of a lane from the beginning of the run to `end` (seconds), and each one's path."""
    scale = WIDTH / max(end, 1e-9)
    paths: dict[str, list[str]] = {}
    for state, start, finish in spans:
        if state in _FORMS and finish > start:
            top, height, _ = _FORMS[state]
            width = max(1.0, (min(finish, end) - start) * scale)
            paths.setdefault(state, []).append(
                f"M{start * scale:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z"
            )
    return [(state, "".join(paths[state])) for state in _FORMS if state in paths]


def strip(merged: Values, slot_seconds: float, end: float) -> str:
    """The path of a lane's strip: bars as high as each share, in quarters; one for slots of the same."""
    width = slot_seconds * WIDTH / max(end, 1e-9)
    bars: list[tuple[int, int]] = []  # from which slot, how many quarters
    known = [(place, math.ceil(4 * share)) for place, share in enumerate(merged) if share is not None]
    for place, quarters in known:
        if not bars or quarters != bars[-1][1]:
            bars.append((place, quarters))
    ends = [start for start, _ in bars[1:]] + [place + 1 for place, _ in known[-1:]]
    top, height = _MERGED
    path = []
    for (start, quarters), finish in zip(bars, ends, strict=True):
        if quarters > 0:
            tall = height * quarters / 4
            x, w = start * width, (finish - start) * width
            path.append(f"M{x:.1f} {top + height - tall:.1f}h{w:.1f}v{tall:.1f}h-{w:.1f}z")
    return "".join(path)


def legend(view: RunView) -> dict[str, tuple[int, int, str]]:
    """The forms of a lane in this run, and what they mean."""
    shown = _FORMS if any(one.hosts for one in view.learners) else STATES
    return {state: form for state, form in shown.items() if state != "spare"}


def chart(
    title: str, unit: str, lines: Sequence[Line], end: float, zero: bool = False, x: str = ""
) -> Chart | None:
    """Curves over time up to `end` (seconds), or over `x` if that is named; None if nothing is known."""
    values = [y for line in lines for y in line.ys if y is not None]
    if not values:
        return None
    ticks = _ticks(values, zero)
    drawn = [Curve(line.label, _path(line, end, ticks[0], ticks[-1]), _look(line)) for line in lines]
    known = [[y for y in line.ys if y is not None and line.place is not None] for line in lines]
    named = [(curve, ys[-1]) for curve, ys in zip(drawn, known, strict=True) if ys]
    told = "; ".join(f"{curve.label} {amount(value)}" for curve, value in named)
    in_words = f"{title}{unit and f' in {unit}'}. At the end: {told}."
    return Chart(title, unit, x, end, ticks, drawn, [curve for curve, _ in named], in_words)


def _look(line: Line) -> str:
    if line.place is None:
        return "curve many"
    return "curve global" if line.place < 0 else f"curve c{line.place % COLOURS}"


def _path(line: Line, end: float, low: float, high: float) -> str:
    across, up = WIDTH / max(end, 1e-9), HEIGHT / max(high - low, 1e-12)
    points = [
        (x * across, HEIGHT - (y - low) * up) for x, y in zip(line.xs, line.ys, strict=True) if y is not None
    ]
    drawn = "".join(f"{'L' if place else 'M'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    if len(points) == 1:  # a dot
        drawn += "h1"
    return drawn


def _ticks(values: Sequence[float], zero: bool) -> list[float]:
    """Four to seven round numbers that enclose all values; what sticks out far above is cut off."""
    ordered = sorted(values)
    low, high = (0.0 if zero else ordered[0]), ordered[-1]
    if not zero and len(ordered) > 20:
        high = min(high, ordered[len(ordered) * 98 // 100] + (ordered[-1] - low) / 8)
    if high - low < 1e-9:
        high = low + (abs(low) or 1.0)
    power = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if 5 * power * times >= (high - low) * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, last + 1)]
