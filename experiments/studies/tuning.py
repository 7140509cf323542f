"""A tuning protocol: one climb on one grid with one budget for every algorithm, with its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cli import program
from experiments.cli.tables import markdown
from experiments.studies.comparison import check_labels

Point = tuple[Any, ...]  # a value for each axis
Places = tuple[int, ...]  # of axes
Climb = Generator[Point, float, Point]


def climb(axes: Sequence[Sequence[Any]], start: Point, budget: int, together: Places = ()) -> Climb:
    """Looks for the lowest loss on a grid from `start`; yields points, wants their losses, returns the best.

    It tries the neighbours on one axis after another, goes on in a direction for as long as the loss falls,
    and ends where no neighbour is lower, or after `budget` points. No point is asked for twice. The axes at
    the places `together`, if there are any, are moved at once too, after those before the last of them.
    """
    losses = {start: (yield start)}
    best, moved = start, True
    while moved:
        moved = False
        for places in _moves(axes, together):
            for step in (1, -1):
                while (neighbour := _beside(axes, best, places, step)) is not None:
                    if neighbour not in losses:
                        if len(losses) == budget:
                            break
                        losses[neighbour] = yield neighbour
                    if losses[neighbour] >= losses[best]:
                        break
                    best, moved = neighbour, True
    return best


def _moves(axes: Sequence[Sequence[Any]], together: Places) -> list[Places]:
    """The axes, by their places, that are moved at once."""
    alone: list[Places] = [(place,) for place in range(len(axes))]
    return [*alone[: max(together) + 1], together, *alone[max(together) + 1 :]] if together else alone


def _beside(axes: Sequence[Sequence[Any]], point: Point, places: Places, step: int) -> Point | None:
    """The point one value further on the axes at these places; None if an axis ends."""
    moved = list(point)
    for place in places:
        i = axes[place].index(point[place]) + step
        if not 0 <= i < len(axes[place]):
            return None
        moved[place] = axes[place][i]
    return tuple(moved)


class TuningRow(NamedTuple):
    """An algorithm to be tuned.

    Attributes:
      preset: what stands after the colon of `--config`.
      settings: those that are not tuned.
      axes: the values of each setting that is.
      start: where the climb begins.
      against: the label of the row whose losses its own are held against, or None.
      together: the places of axes that are moved at once as well as each alone.
    """

    label: str
    preset: str
    settings: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    start: Point
    against: str | None
    together: Places = ()


class TuningPlan(NamedTuple):
    """What `get_tuning()` of a config file says: rows, points a row at most, and settings for choosing."""

    rows: list[TuningRow]
    budget: int
    choosing: Mapping[str, Any]


def plan_of(argument: str) -> TuningPlan:
    """The plan of `FILE.py[:ARGUMENT]`.

    Raises:
      UsageError: no such file or argument, no row, or one that lacks something or begins outside its grid.
    """
    given = program.load_and_call(argument, "get_tuning", "config")
    try:
        return _plan(argument, given)
    except KeyError as error:
        raise program.UsageError(
            f"config: {argument}: its get_tuning(), or a row of it, lacks {error}"
        ) from None


def _plan(argument: str, given: Mapping[str, Any]) -> TuningPlan:
    if not given["rows"]:
        raise program.UsageError(f"config: {argument}: its get_tuning() names no row")
    rows = []
    for entry in given["rows"]:
        axes = {name: tuple(given["grid"][name]) for name in entry["axes"]}
        for name, values in axes.items():
            if entry[name] not in values:
                raise program.UsageError(
                    f"config: {entry['label']!r}: {name} is {entry[name]}, not of {values}"
                )
        keys = ("label", "preset", "axes", "against", *axes)
        own = {name: value for name, value in entry.items() if name not in keys}
        start = tuple(entry[name] for name in axes)
        pair = given.get("together", ())
        together = tuple(map(list(axes).index, pair)) if set(pair) <= set(axes) else ()
        rows.append(
            TuningRow(entry["label"], entry["preset"], own, axes, start, entry.get("against"), together)
        )
    check_labels(argument, [(row.label, row.against) for row in rows])
    return TuningPlan(rows, given["budget"], given["choosing"])


def check_free(row: TuningRow, given: Sequence[str]) -> None:
    """Checks that settings of the command line leave to the row what its runs differ in.

    Raises:
      UsageError: one of them, or of the row, is the seed or an axis.
    """
    for name in ("seed", *row.axes):
        if name in given or name in row.settings:
            by = "--seeds and --tuning_seeds set it" if name == "seed" else "it is tuned"
            raise program.UsageError(f"config.{name}: is set for {row.label!r}, but {by}")


def each_value(row: TuningRow) -> list[Point]:
    """Where the row's climb begins, and each value of its axes beside the others there."""
    found = dict.fromkeys([row.start])
    for place, values in enumerate(row.axes.values()):
        found |= dict.fromkeys((*row.start[:place], value, *row.start[place + 1 :]) for value in values)
    return list(found)


class Tried(NamedTuple):
    """A point of a row's climb: its mean loss, infinite if a run had none, and the tokens of its runs."""

    point: Point
    loss: float
    tokens: int


class Tuned(NamedTuple):
    """The end of a row's climb."""

    row: TuningRow
    tried: list[Tried]
    best: Point
    budget: int

    def settings(self) -> dict[str, Any]:
        """The best value of each setting that was tuned."""
        return dict(zip(self.row.axes, self.best, strict=True))

    def cut_short(self) -> bool:
        """Whether the budget ended before all neighbours of the best point had been tried."""
        known = {tried.point for tried in self.tried}
        return len(self.tried) == self.budget and any(n not in known for n in neighbours(self.row, self.best))

    def at_edge(self) -> list[str]:
        """The settings whose best value is an end of their grid, so that a better one may lie beyond."""
        ends = zip(self.row.axes.items(), self.best, strict=True)
        return [name for (name, values), value in ends if value in (values[0], values[-1])]


def tune(
    plan: TuningPlan, losses: Callable[[list[tuple[TuningRow, Point]]], list[tuple[float, int]]]
) -> list[Tuned]:
    """The end of every row's climb; rows climb side by side, a point each at a time.

    `losses`: the mean loss and the tokens of the runs at each of these points.
    """
    climbs = {
        row.label: climb([*row.axes.values()], row.start, plan.budget, row.together) for row in plan.rows
    }
    points = {label: next(one) for label, one in climbs.items()}
    tried: dict[str, list[Tried]] = {row.label: [] for row in plan.rows}
    best: dict[str, Point] = {}
    while points:
        asked = [(row, points.pop(row.label)) for row in plan.rows if row.label in points]
        for (row, point), found in zip(asked, losses(asked), strict=True):
            tried[row.label].append(Tried(point, *found))
            try:
                points[row.label] = climbs[row.label].send(found[0])
            except StopIteration as end:
                best[row.label] = end.value
    return [Tuned(row, tried[row.label], best[row.label], plan.budget) for row in plan.rows]


def neighbours(row: TuningRow, point: Point) -> list[Point]:
    """The points to which one move leads from this one."""
    axes = list(row.axes.values())
    found = [_beside(axes, point, places, step) for places in _moves(axes, row.together) for step in (1, -1)]
    return [one for one in found if one is not None]


def choices(tuned: Sequence[Tuned]) -> str:
    """The table of what was chosen: best values, the loss there, and what the search cost."""
    names = list(dict.fromkeys(name for one in tuned for name in one.row.axes))
    lines = []
    for one in tuned:
        best = one.settings()
        edges = one.at_edge()
        cells = [f"{best[n]}{' (edge)' * (n in edges)}" if n in best else "-" for n in names]
        loss = min(tried.loss for tried in one.tried)
        points = f"{len(one.tried)}{', cut short' if one.cut_short() else ''}"
        tokens = sum(tried.tokens for tried in one.tried)
        lines.append([one.row.label, *cells, f"{loss:.4f}", points, f"{tokens / 1e6:.1f}M"])
    return markdown(["", *names, "loss when chosen", "points", "tokens"], lines, align=True)


def to_json(tuned: Sequence[Tuned]) -> list[dict[str, Any]]:
    """Everything that is known of each row's climb; a loss that there is none of is None."""
    return [
        {
            "label": one.row.label,
            "preset": one.row.preset,
            "settings": dict(one.row.settings),
            "axes": {name: list(values) for name, values in one.row.axes.items()},
            "tried": [
                {
                    **dict(zip(one.row.axes, tried.point, strict=True)),
                    "loss": tried.loss if math.isfinite(tried.loss) else None,
                    "tokens": tried.tokens,
                }
                for tried in one.tried
            ],
            "best": one.settings(),
            "at_edge": one.at_edge(),
            "cut_short": one.cut_short(),
        }
        for one in tuned
    ]
