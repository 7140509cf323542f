"""Blind mutation: what ends in a new way is mutated further."""

import collections
import faulthandler
import random
import re
import time

from tests.fuzz import seeds, targets

HANGS = 120.0  # seconds after which an input is taken for one that never ends
MOST = 2000  # inputs of a target that are mutated further


def mutated(rng, data, other):
    """The data with some bytes cut out, doubled, replaced, or taken from another input."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, length = rng.randint(0, len(changed)), rng.choice((0, 1, 1, 2, 4, 8))
        match rng.randrange(5):
            case 0:
                changed[at : at + length] = rng.randbytes(rng.choice((0, 1, 1, 2, 4, 8)))
            case 1:
                changed[at:at] = changed[at : at + length]
            case 2 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 3:
                changed[at : at + length] = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * length
            case 4 if other:
                begin = rng.randrange(len(other))
                changed[at : at + length] = other[begin : begin + rng.choice((1, 2, 4, 8, 32))]
    return bytes(changed)


def explore(names, seconds, seed=0):
    """Mutates for so long; how many inputs each target has read.

    Raises:
      AssertionError: a target raised what it must not raise; the message has the input.
    """
    rng = random.Random(seed)
    corpus = {name: list(seeds.of(name)) for name in names}
    seen = {name: set() for name in names}
    counts = collections.Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name = rng.choice(names)
        data = mutated(rng, rng.choice(corpus[name]), rng.choice(corpus[name]))
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            ended = re.sub(r"\d+|'[^']*'", "_", targets.feed(name, data))
        except Exception as error:
            raise AssertionError(f"{name}: {data!r}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        counts[name] += 1
        if ended not in seen[name] and len(corpus[name]) < MOST:
            seen[name].add(ended)
            corpus[name].append(data)
    return counts
