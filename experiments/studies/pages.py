"""The page of a study: all its runs side by side, as one HTML file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import pandas as pd

from ddiloco.dashboard import study
from ddiloco.telemetry.formatting import amount, number, seconds, size
from experiments.studies import results

_BEGINNING = 0.25  # share of a curve that is left out: the fall from the initial loss would flatten all else
_OVER = {"tokens": "tokens", "bytes": "bytes over links", "seconds": ""}  # the last has the clock's name


def page(
    title: str, frame: pd.DataFrame, by: Sequence[str], columns: Sequence[str], names: Sequence[str]
) -> str:
    """The page of a results table; `names`: of the runs' folders, in the order of its rows."""
    points = results.ranked(frame, by)
    head, *rows = results.cells(frame, by, columns)
    above = {one.place: results.plus_minus(one.above, one.error, "+.4f") for one in points}
    order = [*above, *(place for place in range(len(rows)) if place not in above)]
    loss = results.COLUMNS["eval_loss"].title
    at = head.index(loss) + 1 if loss in head else len(head)
    beside = {place: "best" if place == order[0] else text for place, text in above.items()}
    table = [[*head[:at], "above the best", *head[at:]]]
    table += [[*rows[i][:at], beside.get(i, "-"), *rows[i][at:]] for i in order]
    charts = [study.losses(_OVER[x] or results.clock_of(frame), list(_curves(frame, by, x))) for x in _OVER]
    done = int(frame.finished.sum())
    return study.document(
        study.StudyView(
            title,
            f"{done} of {len(frame)} runs have finished",
            results.standing(frame, by),
            [chart for chart in charts if chart is not None],
            table,
            list(_runs(frame, names)),
        )
    )


def _curves(frame: pd.DataFrame, by: Sequence[str], x: str) -> Iterator[study.LossCurve]:
    """The scores of each point, the best first: means over its seeds, of the scores that all of them have."""
    groups = [own for _, own in frame.groupby(results.keys(frame, by), sort=False)]
    for one in results.ranked(frame, by):
        histories = [
            [score for score in run.eval_history if None not in (score.get(x), score.get("loss"))]
            for run in groups[one.place].itertuples()
            if run.finished
        ]
        if not all(histories):
            continue
        together = list(zip(*histories, strict=False))
        xs = [statistics.fmean(score[x] for score in scores) for scores in together]
        losses = [statistics.fmean(score["loss"] for score in scores) for scores in together]
        first = next((i for i, at in enumerate(xs) if at >= _BEGINNING * xs[-1]), 0)
        first = min(first, max(0, len(xs) - 2))
        yield study.LossCurve(one.name, xs[first:], losses[first:])


def _runs(frame: pd.DataFrame, names: Sequence[str]) -> Iterator[list[str]]:
    yield ["run", "state", "held-out loss", "tokens", "moved", results.clock_of(frame)]
    for name, run in zip(names, frame.itertuples(), strict=True):
        figures = [
            number(results.or_none(run.eval_loss), ".4f"),
            amount(results.or_none(run.tokens_total)),
            size(results.or_none(run.bytes_moved)),
            seconds(results.or_none(run.wall_seconds)),
        ]
        yield [name, "finished" if run.finished else "not finished", *figures]
