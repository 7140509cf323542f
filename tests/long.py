"""How long the loops of tests are: with LONG=1 in the environment they go all the way."""

import os


def times(usually: int, long: int) -> int:
    """How often a loop goes round."""
    return long if os.environ.get("LONG") else usually
