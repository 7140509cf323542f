"""The page of a study: many runs side by side in one file, by the charts and tables of a run's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.dashboard import sheet
from ddiloco.dashboard.sheet import COLOURS, Chart, ChartLine, chart

Rows = Sequence[Sequence[str]]


class StudyView(NamedTuple):
    """What the page shows, as text; the first of `points` and of `runs` are the names of the columns."""

    title: str
    progress: str
    verdict: Sequence[str]  # the best point in a line, then more about it; none: nothing is known
    charts: Sequence[Chart]
    points: Rows
    runs: Rows


class LossCurve(NamedTuple):
    """Scores of a point, against what they are drawn over."""

    label: str
    xs: Sequence[float]
    losses: Sequence[float]


def document(study: StudyView) -> str:
    """The whole page, one self-contained file."""
    return sheet.render("study.html", study=study, views=(), live=False, inline=True)


def losses(over: str, curves: Sequence[LossCurve]) -> Chart | None:
    """The curves' losses over `over`; only the first few have a colour, so the best come first."""
    lines = [
        ChartLine(curve.label, curve.xs, curve.losses, place if place < COLOURS else None)
        for place, curve in enumerate(curves)
    ]
    end = max((x for curve in curves for x in curve.xs), default=0.0)
    return chart(f"Against {over}", "nats/token", lines, end, x=over)
