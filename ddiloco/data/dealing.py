"""What a shard reads, and how what is left of an epoch is dealt out among another number of shards.

By itself shard m of M reads documents m, m + M, ... of the data set, epoch after epoch, each in an order of
its own. When M changes, what each shard has left of its epoch is put in a row and cut into as many equal
lengths as there are shards now. A shard reads its length first, where half-read documents go on at the token
that was next, and then by itself from the first epoch that no shard had begun. So nothing of an epoch under
way is lost or comes twice, and later epochs are whole. A shard that was an epoch behind does not make it up.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ddiloco.data.errors import DataError

T = TypeVar("T")
Position = Any
"""JSON values: `at`, an inner stream's position, or of a shard that was dealt anew {left, epoch, at}."""


class Stretch(NamedTuple):
    """Documents `first` to `stop - 1` in the reading order of a shard by itself, all epochs on end."""

    num_shards: int
    shard: int
    first: int
    stop: int
    offset: int = 0
    """Tokens of the first one that are read already."""


class Deal(NamedTuple):
    """What a shard reads: what was left to it, and then by itself from an epoch on."""

    left: tuple[Stretch, ...] = ()
    epoch: int = 0


class Hand:
    """The documents of one shard under a deal, numbered 0, 1, ... without end."""

    def __init__(self, deal: Deal, shard: int, num_shards: int, records: int) -> None:
        self._deal = deal
        self._shard = shard
        self._num_shards = num_shards
        self._epoch = share(records, shard, num_shards)
        counts = (stretch.stop - stretch.first for stretch in deal.left)
        self._ends = list(itertools.accumulate(counts))
        self.left = self._ends[-1] if self._ends else 0  # documents of the epoch that was cut

    def at(self, number: int) -> Stretch:
        """The document of this number, alone."""
        if number >= self.left:
            own = self._deal.epoch * self._epoch + number - self.left
            return Stretch(self._num_shards, self._shard, own, own + 1)
        i = bisect.bisect_right(self._ends, number)
        stretch = self._deal.left[i]
        first = stretch.stop - (self._ends[i] - number)
        offset = stretch.offset if first == stretch.first else 0
        return stretch._replace(first=first, stop=first + 1, offset=offset)

    def epoch_of(self, number: int) -> int:
        """The epoch that the document of this number belongs to; what was left is of the one before."""
        if number < self.left:
            return self._deal.epoch - 1
        return self._deal.epoch + (number - self.left) // self._epoch

    def rest(self, begun: int) -> list[Stretch]:
        """What the first `begun` documents leave of the epoch that the last of them belongs to."""
        last = max(begun - 1, 0)
        if last < self.left:
            return cut(self._deal.left, begun, self.left)
        own = self._deal.epoch * self._epoch + begun - self.left
        end = (self.epoch_of(last) + 1) * self._epoch
        return [Stretch(self._num_shards, self._shard, own, end)] if own < end else []


class Stream(Protocol):
    """Endless rows."""

    position: Position
    """Where the next row is, in JSON values; setting it goes there, and forgets what was read ahead."""

    def take(self, count: int) -> dict[str, Any]:
        """The next `count` rows, each array (count, ...)."""


class DealtStream(Generic[T]):
    """The endless rows of one shard; its position says also what was dealt to it.

    Args:
      by_itself: given a shard and the number of shards, what gives the n-th document that it reads by itself.
      rows: makes rows of documents, which it is given by number, and by how many tokens of each are read.
      shard: this one.
      num_shards: how many there are.
      records: documents in the data set.
    """

    def __init__(
        self,
        by_itself: Callable[[int, int], Callable[[int], T]],
        rows: Callable[[Callable[[int], tuple[T, int]]], Stream],
        shard: int,
        num_shards: int,
        records: int,
    ) -> None:
        self._by_itself = functools.cache(by_itself)
        self._of = (shard, num_shards, records)
        self._deal(Deal())
        self._rows = rows(self._document)
        self._start = self._rows.position

    @property
    def position(self) -> Position:
        """Where the next row is, in JSON values."""
        at = self._rows.position
        return at if self._told is None else {**self._told, "at": at}

    @position.setter
    def position(self, position: Position) -> None:
        deal, at = _read(position)
        self._deal(deal)
        self._rows.position = self._start if at is None else at

    def take(self, count: int) -> dict[str, Any]:
        """The next `count` rows."""
        return self._rows.take(count)

    def _deal(self, deal: Deal) -> None:
        self._hand = Hand(deal, *self._of)
        self._told = None if deal == Deal() else _told(deal)

    def _document(self, number: int) -> tuple[T, int]:
        place = self._hand.at(number)
        return self._by_itself(place.shard, place.num_shards)(place.first), place.offset


def deal_anew(
    states: Sequence[Mapping[str, Any]], num_shards: int, jobs: Sequence[Sequence[int]] | None = None
) -> list[dict[str, Any]]:
    """The states from which the batches of `num_shards` shards go on where other batches stopped.

    With as many shards as before, each goes on as it was. Of a shard of which there is no state the whole of
    the newest epoch counts as left: what it had read of that is read again.

    Args:
      states: by `Batches.get_state`, of different shards of one stream.
      num_shards: how many shards there are now.
      jobs: the shards of each of the batches that are to go on; None: a shard each.

    Returns:
      A state for each job, for `Batches.set_state` of batches of the same data over `num_shards` shards. Its
      counts of batches and tokens begin anew where its shards were not read together before.

    Raises:
      DataError: the states are not of one stream, or cannot be read.
    """
    if states and all("num_learners" in state for state in states):
        return _of_loops(states, num_shards)
    jobs = [(m,) for m in range(num_shards)] if jobs is None else jobs
    try:
        stream = states[0]["stream"]
        if any(state["stream"] != stream for state in states):
            raise DataError("the saved positions are of different streams: settings of their data differ")
        had = {int(shard): at for state in states for shard, at in state["shards"].items()}
        if len(had) != sum(len(state["shards"]) for state in states):
            raise DataError("the saved positions are of the same shard more than once")
        positions = _dealt(had, stream["num_shards"], num_shards, stream["records"])
        alike = {frozenset(map(int, state["shards"])): state for state in states}
        counted = [alike.get(frozenset(job)) if num_shards == stream["num_shards"] else None for job in jobs]
        return [
            {
                "stream": {**stream, "num_shards": num_shards},
                "shards": {str(shard): positions[shard] for shard in job},
                "batches": state["batches"] if state else 0,
                "tokens": state["tokens"] if state else 0,
            }
            for job, state in zip(jobs, counted, strict=True)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the saved positions cannot be read: {type(error).__name__}: {error}") from None


def _of_loops(states: Sequence[Mapping[str, Any]], num_learners: int) -> list[dict[str, Any] | None]:
    """Each learner's own position; None where there is none. Only a loop itself knows its data."""
    if any(state["num_learners"] != num_learners for state in states):
        raise DataError(f"the batches of a loop of one's own cannot be dealt to {num_learners} learners")
    own = {state["learner"]: dict(state) for state in states}
    return [own.get(m) for m in range(num_learners)]


def share(records: int, shard: int, num_shards: int) -> int:
    """Documents of one shard by itself, those of an epoch: `shard`, `shard + num_shards`, ..."""
    return len(range(shard, records, num_shards))


def cut(stretches: Sequence[Stretch], start: int, stop: int) -> list[Stretch]:
    """Of all the documents in these stretches, put in a row, those numbered `start` to `stop - 1`."""
    found, before = [], 0
    for stretch in stretches:
        count = stretch.stop - stretch.first
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high:
            offset = stretch.offset if low == 0 else 0
            first = stretch.first
            found.append(stretch._replace(first=first + low, stop=first + high, offset=offset))
        before += count
    return found


def _dealt(had: Mapping[int, Position], before: int, now: int, records: int) -> dict[int, Position]:
    """The positions of `now` shards, of those that some of `before` shards had."""
    halves: list[Stretch] = []
    wholes: list[Stretch] = []
    newest = 0
    for shard, position in sorted(had.items()):
        deal, at = _read(position)
        hand = Hand(deal, shard, before, records)
        begun, lanes = _begun(at)
        for number, offset in lanes:
            document = hand.at(number)
            halves.append(document._replace(offset=document.offset + offset))
        wholes += hand.rest(begun)
        newest = max(newest, hand.epoch_of(max(begun - 1, 0)))
    missing = sorted(set(range(before)) - set(had))
    if now == before:
        return {**had, **{shard: {**_told(Deal((), newest)), "at": None} for shard in missing}}
    for shard in missing:
        epoch = share(records, shard, before)
        wholes.append(Stretch(before, shard, newest * epoch, (newest + 1) * epoch))
    positions = {}
    for shard in range(now):
        left = [*_length(halves, shard, now), *_length(wholes, shard, now)]
        positions[shard] = {**_told(Deal(tuple(left), newest + 1)), "at": None}
    return positions


def _length(stretches: Sequence[Stretch], shard: int, num_shards: int) -> list[Stretch]:
    """The shard's length of the row; no two differ by more than one document."""
    total = sum(stretch.stop - stretch.first for stretch in stretches)
    return cut(stretches, total * shard // num_shards, total * (shard + 1) // num_shards)


def _begun(at: Any) -> tuple[int, list[tuple[int, int]]]:
    """How many documents are begun by an inner stream's position; number and offset of those half read."""
    if at is None:
        return 0, []
    if isinstance(at, int):
        return at, []
    _, begun, *lanes = at
    return begun, [(number, offset) for number, offset in lanes]


def _told(deal: Deal) -> dict[str, Any]:
    return {"left": [list(stretch) for stretch in deal.left], "epoch": deal.epoch}


def _read(position: Position) -> tuple[Deal, Any]:
    if not isinstance(position, Mapping):
        return Deal(), position
    left = tuple(Stretch(*map(int, stretch)) for stretch in position["left"])
    return Deal(left, int(position["epoch"])), position["at"]
