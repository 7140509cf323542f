"""Safe output to a terminal: no control characters, and no blocking on its reader."""

from __future__ import annotations

import select
from typing import TextIO

MAX_LINE_LENGTH = 2000  # characters; few enough for any pipe that has room at all
MAX_TEXT_LENGTH = 1000  # characters of a sentence that somebody else may have written


def printable(text: str, longest: int = MAX_TEXT_LENGTH) -> str:
    """The text in a line that no terminal takes for a command, cut where it is longer than `longest`."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def has_room(stream: TextIO) -> bool:
    """Whether a line can be written without waiting for the stream's reader; True if unknown."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no file behind it
        return True


def print_line(line: str, stream: TextIO) -> bool:
    """Writes a line, unless that had to wait for the stream's reader; returns whether it did."""
    if not has_room(stream):
        return False
    stream.write(line[:MAX_LINE_LENGTH] + "\n")
    stream.flush()
    return True
