"""Records on their way over the wire: bounded, sent once, and numbered, so that losses are seen."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import LARGEST, WireError

MAX_RECORDS = 100_000  # that wait for a connection, about 12 MB: nine hours at three steps a second
BATCH = 256  # records that are sent as one message
BATCH_BYTES = 256 << 10  # of these, which leaves room for what goes with them


class RecordQueue:
    """Records in order, numbered from 0; of too many the oldest are lost. Not for two threads at a time.

    Attributes:
      first: the number of the next one to be sent.
    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self.first = 0
        self._waiting: collections.deque[pb.Record] = collections.deque(maxlen=max_records)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def end(self) -> int:
        """The number of the next one to be put in."""
        return self.first + len(self._waiting)

    def append(self, record: pb.Record) -> None:
        """Puts one in."""
        self.first += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(record)

    def batch(self) -> pb.Records:
        """Removes the next ones: at least one, and at most BATCH or BATCH_BYTES of them."""
        batch, size = pb.Records(first=self.first), 0
        while self._waiting and len(batch.records) < BATCH:
            size += self._waiting[0].ByteSize()
            if batch.records and size > BATCH_BYTES:
                break
            batch.records.append(self._waiting.popleft())
            self.first += 1
        return batch


class Received:
    """The received records of one process."""

    def __init__(self, following: int | None = 0) -> None:
        """`following`: the number of the next one; None: not known, as another syncer had those before it."""
        self._following = following

    def lost(self, batch: pb.Records) -> int:
        """Number of records lost before this batch. Raises WireError: its numbers are impossible."""
        if batch.first > LARGEST:
            raise WireError("malformed record", f"number {batch.first}")
        return 0 if self._following is None else max(0, batch.first - self._following)

    def new(self, batch: pb.Records) -> Iterator[pb.Record]:
        """The records of the batch after all earlier ones; each counts as received at once."""
        for number, record in enumerate(batch.records, batch.first):
            if number >= (self._following or 0):
                self._following = number + 1
                yield record
