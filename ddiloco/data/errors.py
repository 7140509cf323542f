"""The error of the data package: data that is missing, unreadable or too little."""

from __future__ import annotations


class DataError(Exception):
    """The data cannot be had as asked; the message is one line and says what would help."""
