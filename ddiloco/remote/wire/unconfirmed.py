"""Messages that are kept until the other end confirms them, across connections."""

from __future__ import annotations

import collections
import itertools
from typing import Generic, TypeVar

from google.protobuf.message import Message

BATCH_BYTES = 256 << 10  # of messages that are sent as one, which leaves room for what goes with them

T = TypeVar("T", bound=Message)


class Unconfirmed(Generic[T]):
    """Messages in order, numbered from 0; its owner must not use it from two threads at a time.

    Attributes:
      given_up: the oldest ones, of which there were more than `most`.
      sent: the number of the next one to send.
    """

    def __init__(self, most: int) -> None:
        self.given_up = self.sent = self._first = 0
        self._most = most
        self._kept: collections.deque[T] = collections.deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def end(self) -> int:
        """The number of the next one to be put in."""
        return self._first + len(self._kept)

    @property
    def unsent(self) -> int:
        """How many are still to be sent."""
        return self.end - self.sent

    def append(self, message: T) -> None:
        """Puts one in, and gives the oldest up if there are too many."""
        self._kept.append(message)
        if len(self._kept) > self._most:
            self.given_up += 1
            self.confirm(self._first + 1)

    def confirm(self, following: int) -> None:
        """The other end has all before this number."""
        while self._kept and self._first < following:
            self._kept.popleft()
            self._first += 1
        self.sent = max(self.sent, self._first)

    def send_again(self) -> None:
        """A connection is lost, and with it perhaps all that it has sent and nobody has confirmed."""
        self.sent = self._first

    def batch(self, most: int) -> tuple[int, list[T]]:
        """The next ones to send, and the number of the first; they count as sent.

        One at least, and no more than `most` or than BATCH_BYTES of them.
        """
        first, chosen, size = self.sent, list[T](), 0
        for message in itertools.islice(self._kept, first - self._first, first - self._first + most):
            size += message.ByteSize()
            if chosen and size > BATCH_BYTES:
                break
            chosen.append(message)
        self.sent += len(chosen)
        return first, chosen
