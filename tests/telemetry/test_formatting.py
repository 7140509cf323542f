"""Amounts as people say them."""

import math

import pytest

from ddiloco.telemetry.formatting import amount, clock, seconds, share, size


@pytest.mark.parametrize(
    ("say", "values", "said"),
    [
        (seconds, (0.0123, 3.0, 600.0, 9000.0, 400_000.0), ["12.3 ms", "3 s", "10 min", "2.5 h", "4.6 days"]),
        (clock, (0, 61, 3600, 90_000, 200_000, -5), ["0:00", "1:01", "1:00:00", "25:00:00", "2.3 d", "0:00"]),
        (size, (12, 1500, 2.5e9), ["12 B", "1.5 kB", "2.5 GB"]),
        (amount, (0.0, 999.4, 1e3, 2.5e6, 3e15, math.inf), ["0", "999", "1 k", "2.5 M", "3e+03 T", "-"]),
        (share, (0.0, 0.914, 0.996, 1.0), ["0%", "91%", "99.6%", "100%"]),
    ],
)
def test_amounts_are_said_as_people_say_them(say, values, said):
    assert [say(value) for value in values] == said and say(None) == "-"
