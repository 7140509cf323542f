"""The documents of a shard, also when the number of shards changes within an epoch.

*By itself*, that is while M stays the same, shard m of M reads documents m, m + M, ... of the data set, epoch
after epoch, each epoch in an order of its own. When M changes, the unread documents of the old shards'
current epoch are divided evenly among the new shards. A new shard first reads its part of them, half-read
documents from where they were left, and then by itself from the first epoch that no old shard had begun. So
no document of the current epoch is lost or read twice, and later epochs are whole. A shard that was an epoch
behind the others does not read the epoch that it has missed.

A learner that joins beyond the first M shares the shard of learner m, as shard M + m: it starts in the
current epoch of shard m and reads each epoch backwards. Without exchanging a message, the two read no
document twice until they meet; then each goes on to its own end of the epoch.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ddiloco.data.errors import DataError

Position = Any
"""JSON values: where a shard's rows are, `at`; once shards have changed, {left, epoch, at}."""


class ShardSpan(NamedTuple):
    """Documents `first` to `stop - 1` of the order in which a shard by itself reads, over all epochs."""

    num_shards: int
    shard: int
    first: int
    stop: int
    offset: int = 0
    """Tokens of the first document that are already read."""


@dataclasses.dataclass(frozen=True)
class ShardAssignment:
    """The endless sequence of a shard's documents, numbered from 0: first `spans`, then epochs by itself."""

    shard: int
    num_shards: int
    records: int
    """Documents in the data set."""
    spans: tuple[ShardSpan, ...] = ()
    epoch: int = 0
    """The first epoch that the shard reads by itself."""

    def at(self, number: int) -> ShardSpan:
        """The document with this number, as a span of one."""
        if number >= self._in_spans:
            own = self.epoch * self.epoch_size + number - self._in_spans
            return ShardSpan(self.num_shards, self.shard, own, own + 1)
        i = bisect.bisect_right(self._ends, number)
        span = self.spans[i]
        first = span.stop - (self._ends[i] - number)
        offset = span.offset if first == span.first else 0
        return span._replace(first=first, stop=first + 1, offset=offset)

    def epoch_of(self, number: int) -> int:
        """The epoch of the document with this number; `spans` are of the epoch before `self.epoch`."""
        if number < self._in_spans:
            return self.epoch - 1
        return self.epoch + (number - self._in_spans) // self.epoch_size

    def rest(self, begun: int) -> list[ShardSpan]:
        """The rest of the current epoch, once the first `begun` documents have been begun."""
        last = max(begun - 1, 0)
        if last < self._in_spans:
            return _cut(self.spans, begun, self._in_spans)
        own = self.epoch * self.epoch_size + begun - self._in_spans
        end = (self.epoch_of(last) + 1) * self.epoch_size
        return [ShardSpan(self.num_shards, self.shard, own, end)] if own < end else []

    def position(self, at: Any) -> Position:
        """The position `at` of the shard's rows, together with this assignment."""
        return {"left": [list(span) for span in self.spans], "epoch": self.epoch, "at": at}

    def read(self, position: Position) -> tuple[ShardAssignment, Any]:
        """The assignment in a position of this shard, and the position of the shard's rows."""
        if not isinstance(position, Mapping):
            return dataclasses.replace(self, spans=(), epoch=0), position
        spans = tuple(ShardSpan(*map(int, span)) for span in position["left"])
        return dataclasses.replace(self, spans=spans, epoch=int(position["epoch"])), position["at"]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(span.stop - span.first for span in self.spans))

    @property
    def _in_spans(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def epoch_size(self) -> int:
        """Documents in an epoch that the shard reads by itself."""
        return epoch_size(self.records, self.shard, self.num_shards)


class Stream(Protocol):
    """Endless rows."""

    position: Position
    """Position of the next row, in JSON values; setting it seeks there and drops what was read ahead."""

    def take(self, count: int) -> dict[str, Any]:
        """The next `count` rows, each array (count, ...)."""


class Ahead:
    """Documents by number, of which threads read the next ones ahead.

    For one caller, which asks for each document once, mostly in order.
    """

    def __init__(
        self, document: Callable[[int], Any], pool: concurrent.futures.Executor | None, count: int
    ) -> None:
        """`document(n)` reads document n; `pool` reads up to `count` ahead, or none if it is None."""
        self._document, self._pool, self._count = document, pool, count
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}

    def __call__(self, number: int) -> Any:
        """Document `number`; raises what reading it raised."""
        if self._pool is None:
            return self._document(number)
        if number not in self._waiting:
            self.forget()
        for later in range(number, number + self._count + 1):
            if later not in self._waiting:
                self._waiting[later] = self._pool.submit(self._document, later)
        return self._waiting.pop(number).result()

    def forget(self) -> None:
        """Drops what was read ahead, since the numbering of documents has changed."""
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting = {}


class ShardStream:
    """The endless rows of one shard; their position holds the shard's assignment too.

    Args:
      by_itself: (shard, number of shards) -> a function of n: the n-th document that it reads by itself.
      rows: (a function of n: the n-th document) -> the rows made of these documents.
      pool, count: as in `Ahead`.
    """

    def __init__(
        self,
        by_itself: Callable[[int, int], Callable[[int], Any]],
        rows: Callable[[Callable[[int], Any]], Stream],
        shard: int,
        num_shards: int,
        records: int,
        pool: concurrent.futures.Executor | None = None,
        count: int = 0,
    ) -> None:
        self._by_itself = functools.cache(by_itself)
        self._initial = self._assignment = ShardAssignment(shard, num_shards, records)
        self._ahead = Ahead(self._document, pool, count)
        self._rows = rows(self._ahead)
        self._start = self._rows.position

    @property
    def position(self) -> Position:
        """Position of the next row, in JSON values."""
        at = self._rows.position
        return at if self._assignment == self._initial else self._assignment.position(at)

    @position.setter
    def position(self, position: Position) -> None:
        self._assignment, at = self._initial.read(position)
        self._ahead.forget()
        self._rows.position = self._start if at is None else at

    def take(self, count: int) -> dict[str, Any]:
        """The next `count` rows."""
        return self._rows.take(count)

    def _document(self, number: int) -> Any:
        span = self._assignment.at(number)
        document = self._by_itself(span.shard, span.num_shards)(span.first)
        return document[span.offset :] if span.offset else document


def reshard(
    states: Sequence[Mapping[str, Any]], num_shards: int, groups: Sequence[Sequence[int]] | None = None
) -> list[dict[str, Any] | None]:
    """The states from which batches of `num_shards` shards continue where other batches stopped.

    If the number of shards is the same, so are their positions. A shard without a state counts as having read
    nothing of the newest epoch: what it had read of that is read again.

    Args:
      states: from `Batches.get_state`, of different shards of the same data.
      num_shards: how many shards there are now.
      groups: the shards of each of the new batches; None: one shard each.

    Returns:
      A state for each group, for `Batches.set_state` of batches of the same data. Its count of batches
      begins at 0 unless the same shards were read together before. None where no state is known: of a second
      reader, or of a learner's own loop.

    Raises:
      DataError: the states are of different data or cannot be read.
    """
    if states and all("num_learners" in state for state in states):
        return _of_loops(states, num_shards)
    groups = [(m,) for m in range(num_shards)] if groups is None else groups
    try:
        stream = states[0]["stream"]
        if any(state["stream"] != stream for state in states):
            raise DataError("the saved positions are of different streams: settings of their data differ")
        positions = {int(shard): at for state in states for shard, at in state["shards"].items()}
        if len(positions) != sum(len(state["shards"]) for state in states):
            raise DataError("the saved positions are of the same shard more than once")
        positions = _reassigned(positions, stream["num_shards"], num_shards, stream["records"])
        counts = {frozenset(map(int, state["shards"])): state["batches"] for state in states}
        if num_shards != stream["num_shards"]:
            counts = {}
        return [
            {
                "stream": {**stream, "num_shards": num_shards},
                "shards": {str(shard): positions[shard] for shard in group},
                "batches": counts.get(frozenset(group), 0),
            }
            if positions.keys() >= set(group)
            else None
            for group in groups
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the saved positions cannot be read: {type(error).__name__}: {error}") from None


def _of_loops(states: Sequence[Mapping[str, Any]], num_learners: int) -> list[dict[str, Any] | None]:
    """Each learner's own position; None where there is none. Only a loop itself knows its data."""
    if any(state["num_learners"] != num_learners for state in states):
        raise DataError(f"the batches of a loop of one's own cannot be shared among {num_learners} learners")
    own = {state["learner"]: dict(state) for state in states}
    return [own.get(m) for m in range(num_learners)]


def beside(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a new second reader of the same shards, at the ends of their epochs. Raises DataError."""
    try:
        stream = state["stream"]
        shards, records = stream["num_shards"], stream["records"]
        begins = {}
        for shard, position in state["shards"].items():
            assignment, at = ShardAssignment(int(shard), shards, records).read(position)
            epoch = max(assignment.epoch, assignment.epoch_of(max(_begun(at)[0] - 1, 0)))
            second = ShardAssignment(int(shard) + shards, shards, records, epoch=epoch)
            begins[str(second.shard)] = second.position(None)
        return {"stream": dict(stream), "shards": begins, "batches": 0}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the saved position cannot be read: {type(error).__name__}: {error}") from None


def epoch_size(records: int, shard: int, num_shards: int) -> int:
    """Documents of one shard in an epoch: `shard`, `shard + num_shards`, ..."""
    return len(range(shard % num_shards, records, num_shards))


def from_its_end(number: int, epoch_size: int) -> int:
    """Index, in a shard's order, of the n-th document of its second reader, which reads epochs backwards.

    >>> [from_its_end(n, 3) for n in range(6)]
    [2, 1, 0, 5, 4, 3]
    """
    epoch, place = divmod(number, epoch_size)
    return (epoch + 1) * epoch_size - 1 - place


def _reassigned(
    positions: Mapping[int, Position], before: int, now: int, records: int
) -> dict[int, Position]:
    """The positions of `now` shards, given those of some of `before` shards."""
    half_read: list[ShardSpan] = []
    unread: list[ShardSpan] = []
    newest = 0
    for shard, position in sorted(positions.items()):
        assignment, at = ShardAssignment(shard, before, records).read(position)
        begun, unfinished = _begun(at)
        for number, offset in unfinished:
            span = assignment.at(number)
            half_read.append(span._replace(offset=span.offset + offset))
        if shard >= before:  # a second reader's unread documents count with the first reader's
            continue
        second = positions.get(shard + before)
        rest = assignment.rest(begun)
        unread += rest if second is None else _unread_by_both(rest, shard, before, records, second)
        newest = max(newest, assignment.epoch_of(max(begun - 1, 0)))
    missing = [shard for shard in range(before) if shard not in positions]
    if now == before:
        fresh = {m: ShardAssignment(m, now, records, epoch=newest).position(None) for m in missing}
        return {**positions, **fresh}
    for shard in missing:
        size = epoch_size(records, shard, before)
        unread.append(ShardSpan(before, shard, newest * size, (newest + 1) * size))
    result = {}
    for shard in range(now):
        spans = (*_part(half_read, shard, now), *_part(unread, shard, now))
        result[shard] = ShardAssignment(shard, now, records, spans, newest + 1).position(None)
    return result


def _unread_by_both(
    rest: Sequence[ShardSpan], shard: int, num_shards: int, records: int, second: Position
) -> list[ShardSpan]:
    """The part of a shard's unread rest that its second reader, at position `second`, has not read either."""
    assignment, at = ShardAssignment(shard + num_shards, num_shards, records).read(second)
    size = assignment.epoch_size
    first = assignment.epoch * size
    read = first + _begun(at)[0]
    found = []
    for span in rest:
        start = (span.stop - 1) // size * size
        if (span.num_shards, span.shard) == (num_shards, shard) and first <= start < read:
            span = span._replace(stop=min(span.stop, start + max(size - (read - start), 0)))
        if span.first < span.stop:
            found.append(span)
    return found


def _begun(at: Any) -> tuple[int, list[tuple[int, int]]]:
    """How many documents are begun at a position of a shard's rows; number and offset of the unfinished."""
    if at is None:
        return 0, []
    if isinstance(at, int):
        return at, []
    _, begun, *unfinished = at
    return begun, [(number, offset) for number, offset in unfinished]


def _part(spans: Sequence[ShardSpan], shard: int, num_shards: int) -> list[ShardSpan]:
    """The shard's part of these documents; no two parts differ by more than one document."""
    total = sum(span.stop - span.first for span in spans)
    return _cut(spans, total * shard // num_shards, total * (shard + 1) // num_shards)


def _cut(spans: Sequence[ShardSpan], start: int, stop: int) -> list[ShardSpan]:
    """The documents from `start` to `stop - 1`, counted over all these spans."""
    found, before = [], 0
    for span in spans:
        count = span.stop - span.first
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high:
            offset = span.offset if low == 0 else 0
            found.append(span._replace(first=span.first + low, stop=span.first + high, offset=offset))
        before += count
    return found
