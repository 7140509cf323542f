"""The identity of a run's folder: a random id of the run's first start.

Its file is the last that a start writes: once it exists, all that the run needs does too.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import NamedTuple

from ddiloco.storage import array_file

FRAGMENT = b"ddiloco fragment 1\n"
"""What a durable fragment's file begins with."""

_NAME = "run.json"


class RunMarkError(Exception):
    """The file cannot be used; the message is one line and names it."""


class RunMark(NamedTuple):
    """The run, and which of its starts wrote the files; both random, in hex."""

    run: str
    start: str

    def save(self, folder: pathlib.Path) -> None:
        """Marks what is in the folder as complete; raises OSError."""
        array_file.replace(folder / _NAME, [json.dumps(self._asdict()).encode()])


def _of_fragments(folder: pathlib.Path) -> RunMark | None:
    """The run of the merged fragments, where the mark is missing; None: nothing was merged."""
    for path in sorted(folder.glob("fragment-[0-9]*")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if array_file.load_header(path, FRAGMENT)["version"]:  # of a first start all have 0
                header, _ = array_file.load(path, FRAGMENT)
                return RunMark(header["run"], "")
    return None


def begun(folder: pathlib.Path) -> RunMark | None:
    """The run whose start was completed in the folder; None: none was. May raise RunMarkError."""
    path = folder / _NAME
    try:
        values = json.loads(path.read_text())
        return RunMark(str(values["run"]), str(values["start"]))
    except FileNotFoundError:
        return _of_fragments(folder)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunMarkError(f"{path}: cannot be used: {type(error).__name__}") from None
