"""A mistake: a text of the package, what to put in its place, and the tests that should notice.

The text stands in the package once, and is looked for in all of its files, so that moving code moves nothing
here. Tests are named by the end of their path.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
      name: what is wrong with it, in a few words.
      old: the text of the package.
      new: the mistake in its place.
      tests: files or folders, the likeliest to notice first.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
