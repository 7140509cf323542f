"""Mistakes of the driver. A peer's mistake never raises: the answer is a `Drop`, or a message to the peer."""

from __future__ import annotations


class LocalProtocolError(RuntimeError):
    """The driver gave a core an impossible event, such as the end of a merge that was never begun."""
