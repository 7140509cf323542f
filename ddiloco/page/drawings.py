"""What is drawn: lanes of states, and curves over time, as SVG that stretches with the page.

Labels are text of the page beside the drawing, so that they stay readable at any width. What colour says is
said by form too: a lane's states differ in height and hatching, curves in their dashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.observe.words import amount, clock
from ddiloco.page.elements import Html, el
from ddiloco.page.timeline import Span
from ddiloco.page.view import Values

WIDTH = 1000
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


def lane(
    spans: Sequence[Span], end: float, label: str, merged: Values = (), slot_seconds: float = 0.0
) -> Html:
    """States from the beginning of the run to `end` (seconds), and which merges a learner was in."""
    scale = WIDTH / max(end, 1e-9)
    paths: dict[str, list[str]] = {}
    for state, start, finish in spans:
        if state in _FORMS and finish > start:
            top, height, _ = _FORMS[state]
            width = max(1.0, (min(finish, end) - start) * scale)
            paths.setdefault(state, []).append(
                f"M{start * scale:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z"
            )
    drawn = [el("path", d="".join(paths[state]), class_=f"is-{state}") for state in _FORMS if state in paths]
    return el(
        "svg",
        *drawn,
        el("path", d=_strip(merged, slot_seconds * scale), class_="merged") if merged else None,
        class_="lane",
        viewBox=f"0 0 {WIDTH} 28",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def _strip(merged: Values, width: float) -> str:
    """Bars of the height of each share; one bar for slots of the same share, in quarters."""
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


def legend(hosts: bool) -> Html:
    """What the forms of a lane mean, and of those of hosts where there are any."""
    forms = _FORMS if hosts else STATES
    shown = [
        _item(el("path", d=f"M0 {top}h24v{height}h-24z", class_=f"is-{state}"), meaning)
        for state, (top, height, meaning) in forms.items()
        if state != "spare"
    ]
    strip = el("path", d="M0 7h24v6h-24z", class_="merged")
    return el("ul", shown, _item(strip, "its work was merged"), class_="legend")


def patterns() -> Html:
    """The hatchings that lanes refer to; once in a page."""
    hatch = el("pattern", el("path", d="M0 8L8 0", class_="hatch"), id="hatch", **_tiled(8))
    bars = el("pattern", el("rect", width=4, height=8, class_="hung-bars"), id="bars", **_tiled(7))
    return el("svg", el("defs", hatch, bars), width=0, height=0, aria_hidden="true", class_="spoken")


def _tiled(width: int) -> dict[str, object]:
    return {"patternUnits": "userSpaceOnUse", "width": width, "height": 8}


def _item(path: Html, meaning: str) -> Html:
    drawn = el("svg", path, viewBox="0 0 24 20", class_="swatch", aria_hidden="true")
    return el("li", drawn, f" {meaning}")


def axis(end: float) -> Html:
    """Times below a drawing, from 0 to `end` seconds."""
    ticks = [el("span", clock(end * part / 4)) for part in range(5)]
    return el("div", ticks, class_="axis", aria_hidden="true")


def chart(
    title: str, unit: str, lines: Sequence[Line], end: float, zero: bool = False, x: str = ""
) -> Html | None:
    """Curves over time up to `end` (seconds), or over `x` if that is named; None if nothing is known."""
    values = [y for line in lines for y in line.ys if y is not None]
    if not values:
        return None
    at = _ticks(values, zero)
    paths = [_path(line, end, at[0], at[-1]) for line in lines]
    heights = [round(200 * place / (len(at) - 1), 1) for place in range(len(at))]
    grid = [el("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid") for y in heights]
    ticks = [el("span", amount(tick)) for tick in reversed(at)]
    named = [line for line in lines if line.place is not None and _last(line.ys) is not None]
    strokes = [_item(el("path", d="M0 10h24", class_=_class(line)), line.label) for line in named]
    last = "; ".join(f"{line.label} {amount(_last(line.ys))}" for line in named)
    drawing = el(
        "svg",
        grid,
        paths,
        class_="plot",
        viewBox=f"0 0 {WIDTH} 200",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}{unit and f' in {unit}'}. At the end: {last}.",
    )
    below = (
        axis(end) if not x else el("div", el("span", "0"), el("span", f"{amount(end)} {x}"), class_="axis")
    )
    return el(
        "figure",
        el("figcaption", title, el("span", f" {unit}", class_="unit") if unit else None),
        el("div", el("div", ticks, class_="ticks", aria_hidden="true"), drawing, class_="plotted"),
        below,
        el("ul", strokes, class_="legend") if len(named) > 1 else None,
    )


def _class(line: Line) -> str:
    if line.place is None:
        return "curve many"
    return "curve global" if line.place < 0 else f"curve c{line.place % COLOURS}"


def _path(line: Line, end: float, low: float, high: float) -> Html:
    across, up = WIDTH / max(end, 1e-9), 200 / max(high - low, 1e-12)
    points = [
        (x * across, 200 - (y - low) * up) for x, y in zip(line.xs, line.ys, strict=True) if y is not None
    ]
    drawn = "".join(f"{'L' if place else 'M'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    if len(points) == 1:  # a dot
        drawn += "h1"
    return el(
        "path", el("title", line.label), d=drawn, class_=_class(line), vector_effect="non-scaling-stroke"
    )


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


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
