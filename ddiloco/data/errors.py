"""The error of the data package: data that is missing, unreadable or too little."""

from __future__ import annotations


class DataError(Exception):
    """The data cannot be read as configured; the message is one line and says what would help."""
