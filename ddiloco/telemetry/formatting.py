"""Formats amounts for people; unknown ones are a dash."""

from __future__ import annotations

import math


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172800 else f"{value / 86400:.1f} days"


def clock(value: float | None) -> str:
    """A moment of a run, as a clock that began with it shows it."""
    if value is None:
        return "-"
    minutes, second = divmod(max(0, round(value)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{value / 86400:.1f} d"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(value: float | None) -> str:
    """Bytes."""
    return amount(value, "B")


def amount(value: float | None, unit: str = "") -> str:
    """A number with three digits, and the letter of its thousands."""
    if value is None or not math.isfinite(value):
        return "-"
    prefixes = iter("kMGT")
    prefix = ""
    while abs(value) >= 999.5 and prefix != "T":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}".rstrip()


def number(value: float | None, form: str) -> str:
    """A number in this format."""
    return "-" if value is None else format(value, form)


def share(value: float | None) -> str:
    """A share of the whole, in percent."""
    return "-" if value is None else f"{value:.1%}" if 0.995 <= value < 1 else f"{value:.0%}"
