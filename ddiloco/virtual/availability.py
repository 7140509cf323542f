"""Availability of learners over time: changes from a seeded model, or from a trace in a CSV file."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddiloco.config import ConfigError, build
from ddiloco.goodput.accounting import State

PAUSES = {
    "detect": State.DETECTING,
    "reconfigure": State.RECONFIGURING,
    "replay": State.REPLAYING,
}
COLUMNS = ("time", "learner", "event")  # that a trace must have; it may have share
EVENTS = ("join", "leave", "fail", "recover", "step", *PAUSES)


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that happens to a learner.

    join: a new process starts. leave: it goes and gives its chips back. fail: it dies and loses its memory.
    recover: a dead one is restarted on all its chips. detect, reconfigure, replay: it lives, but takes no
    step for that reason. step: it steps again, on `share` of its chips. Changes while it starts hold from its
    first step on.
    """

    time: float  # virtual seconds
    learner: int
    event: str
    share: float = 1.0  # of the chips, in a step

    def __post_init__(self) -> None:
        if not self.time >= 0.0:
            raise ValueError(f"time: is {self.time}, but must be at least 0")
        if self.learner < 0:
            raise ValueError(f"learner: is {self.learner}, but must be at least 0")
        if self.event not in EVENTS:
            raise ValueError(f"event: is {self.event!r}, but must be one of {', '.join(EVENTS)}")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share: is {self.share}, but must be above 0 and at most 1")


def read_trace(path: pathlib.Path | str, num_learners: int) -> list[Change]:
    """The changes in a trace file, by time; those with equal times in the file's order.

    It is CSV, with a header of time, learner, event and optionally share.

    Raises:
      ConfigError: the file or a line of it cannot be read; the message names line and field.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    changes = [(place, _change(place, row, num_learners)) for place, row in _rows(path, text)]
    changes.sort(key=lambda pair: pair[1].time)
    check_changes(changes, num_learners)
    return [change for _, change in changes]


def write_trace(path: pathlib.Path | str, changes: Iterable[Change]) -> None:
    """Writes a CSV file that `read_trace` reads back, to the bit."""
    with pathlib.Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Change))
        writer.writerows((repr(c.time), c.learner, c.event, repr(c.share)) for c in changes)


def check_changes(changes: Sequence[tuple[str, Change]], num_learners: int) -> None:
    """Checks that no learner joins while present, dies while dead, or steps while absent.

    `changes`: each change with its place in the trace, in the order of their times.

    Raises:
      ConfigError: one does; the message names the place.
    """
    first = {change.learner: change.event for _, change in reversed(changes)}
    there = {m: first.get(m) != "join" for m in range(num_learners)}
    for place, change in changes:
        comes = change.event in ("join", "recover")
        if comes is there[change.learner]:
            state = "there" if comes else "not there"
            raise ConfigError(
                f"{place}: event: {change.event} of learner {change.learner} at {change.time:g} s, "
                f"but it is {state} then"
            )
        if comes or change.event in ("fail", "leave"):
            there[change.learner] = comes


def _rows(path: pathlib.Path, text: str) -> list[tuple[str, Mapping[str, str | None]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{path}: line 1: has no column {missing[0]}; it must name {', '.join(COLUMNS)}"
            )
        return [(f"{path}: line {reader.line_num}", row) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num + 1}: is not CSV: {error}") from None


def _change(place: str, row: Mapping[str, Any], num_learners: int) -> Change:
    given = {str(name): _value(text) for name, text in row.items() if text not in (None, "")}
    change = build(Change, given, f"{place}: change")
    if change.learner >= num_learners:
        told = f"is {change.learner}, but must be below {num_learners}"
        raise ConfigError(f"{place}: change.learner: {told}")
    return change


def _value(text: Any) -> Any:
    """The number that the text is, if it is one."""
    with contextlib.suppress(TypeError, ValueError):
        number = float(text)
        return int(number) if number.is_integer() else number
    return text
