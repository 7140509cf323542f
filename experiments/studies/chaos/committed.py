"""Whether outer steps were lost or made twice, and work merged twice: from a run's records alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol.policy import MAX_AGE

_RETURNS = 100_000  # a process's incarnations are its start in microseconds and the next few numbers


class Contributed(NamedTuple):
    """An entry of a round's `contributions` in rounds.jsonl."""

    learner: int
    incarnation: int
    version: int  # of the fragment, that the work was done on
    step: int  # the learner's clock at the end of the work
    steps: int
    tokens: int


@dataclasses.dataclass
class OuterSteps:
    """The books of a run's outer steps, all fragments together."""

    committed: int = 0  # versions that the run ended with
    recorded: int = 0  # of them those with a line in rounds.jsonl
    unrecorded: int = 0  # those whose line died with the syncer, but which were durable
    lost: int = 0  # versions that were announced and later were not there
    twice: int = 0  # versions that were made again
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class CommittedWork:
    """The books of the work that was merged."""

    contributions: int = 0
    merged_tokens: int = 0  # of all fragments together
    twice_tokens: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def check_outer_steps(
    rounds: Sequence[Mapping[str, Any]], durable: Sequence[tuple[float, Sequence[int]]]
) -> OuterSteps:
    """Follows the versions of each fragment through all lives of the syncer.

    A line of rounds.jsonl is written after its round is durable, so the last lines before a death may be
    missing, while the files of the fragments have their versions. Within a life versions must rise by one
    from what the life before left, and none may be above what this one left.

    Args:
      rounds: the lines of rounds.jsonl: "time", "fragment" and "version" are used.
      durable: for each end of a syncer's process, in order, the time (unix seconds) at which it was found,
        before another was started, and the version by fragment then on disk. The last is the run's end.
    """
    books = OuterSteps()
    if not durable:
        books.problems.append("the syncer's durable state was never seen")
        return books
    begin: Sequence[int] = [0] * len(durable[-1][1])
    since = -float("inf")
    for until, left in durable:
        own = [r for r in rounds if since < r["time"] <= until]
        for p, (first, last) in enumerate(zip(begin, left, strict=True)):
            _check_life(books, p, first, last, [r["version"] for r in own if r["fragment"] == p])
        begin, since = left, until
    if late := sum(r["time"] > since for r in rounds):
        books.problems.append(f"{late} rounds after the syncer's last end")
    books.committed = sum(durable[-1][1])
    if books.recorded + books.unrecorded - books.twice != books.committed:
        books.problems.append(
            f"{books.recorded} rounds on record, {books.unrecorded} without and {books.twice} twice do not "
            f"make {books.committed} versions"
        )
    return books


def _check_life(books: OuterSteps, p: int, first: int, last: int, made: Sequence[int]) -> None:
    """One fragment in one life of the syncer, which found version `first` and left `last`."""
    books.recorded += len(made)
    again = [v for i, v in enumerate(made) if v <= first or v in made[:i]]
    if again:
        books.twice += len(again)
        books.problems.append(f"fragment {p}: versions {again} were made twice")
    missing = max([first, *made]) - last
    if missing > 0:
        books.lost += missing
        books.problems.append(f"fragment {p}: was at version {last + missing}, and after a death at {last}")
    new = [v for v in made if v > first]
    if any(b != a + 1 for a, b in itertools.pairwise([first, *new])):
        books.problems.append(f"fragment {p}: versions {new} do not go up by one from {first}")
    books.unrecorded += max(0, last - max([first, *new]))


def check_work(rounds: Sequence[Mapping[str, Any]]) -> CommittedWork:
    """Books each contribution as the interval of its learner's clock in which the work was done.

    `steps` steps that end at clock c began at c - steps or earlier, since clocks only jump forward; what a
    process merges into a fragment later must begin at c or later. Work on a later version than the one that
    was replaced, or on one that is too old, is as bad. Rounds that died unrecorded with the syncer are not
    seen here.
    """
    books, processes = CommittedWork(), _processes(rounds)
    merged_up_to: dict[tuple[Any, int], int] = {}  # by process and fragment, its last merged step
    for line in rounds:
        entries = [Contributed(*entry) for entry in line["contributions"]]
        where = f"fragment {line['fragment']}, version {line['version']}"
        for c in entries:
            books.contributions += 1
            books.merged_tokens += c.tokens
            process = processes[c.learner, c.incarnation]
            before = merged_up_to.get((process, line["fragment"]), 0)
            overlap = min(c.steps, max(0, before - (c.step - c.steps)))
            if not 0 <= line["version"] - 1 - c.version <= MAX_AGE:
                overlap = c.steps
            if overlap:
                books.twice_tokens += round(c.tokens * overlap / c.steps)
                books.problems.append(f"{where}: {overlap} of {c.steps} steps of learner {c.learner} again")
            merged_up_to[process, line["fragment"]] = max(before, c.step)
        if len({c.learner for c in entries}) < len(entries):
            books.problems.append(f"{where}: a learner gave twice to one merge")
    return books


def _processes(rounds: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[int, int]]:
    """By learner and incarnation: the learner and the first incarnation of the process that had both."""
    seen = sorted({(c[0], c[1]) for line in rounds for c in line["contributions"]})
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    for learner, incarnation in seen:
        latest = max((i for m, i in owner if m == learner), default=None)
        same = latest is not None and incarnation - latest < _RETURNS
        owner[learner, incarnation] = owner[learner, latest] if same else (learner, incarnation)
    return owner
