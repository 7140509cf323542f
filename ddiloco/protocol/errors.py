"""Mistakes of the driver. A peer's mistake never raises: it comes back as a `Drop`, or the peer is told."""

from __future__ import annotations


class LocalProtocolError(RuntimeError):
    """The driver told a core something impossible, such as the end of a merge that was never asked for."""
