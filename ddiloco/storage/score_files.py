"""Files by which a remote run's evaluator and syncer communicate, in a folder of the workdir.

The evaluator adds a line for each score. At the end the syncer writes which score is the last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddiloco.storage import array_file
from ddiloco.telemetry.files import GrowingFile
from ddiloco.telemetry.folder_identity import is_locked, take
from ddiloco.telemetry.trimming import EVALUATOR_LOCK

FOLDER = "evaluator"  # of a run, in its workdir


class Wanted(NamedTuple):
    """The last score that a syncer wants, of its final fragments."""

    run: str
    ask: str
    """Random: another syncer of the run asks again."""
    step: int
    tokens: int
    versions: tuple[int, ...]
    """By fragment."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A score of the global model; `loss` None: none was wanted, or `problem` has the reason."""

    run: str
    step: int  # the global step
    tokens: int  # that the global model has seen
    time: float  # unix seconds
    loss: float | None = None  # nats per token
    statistics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    answers: str = ""  # the `ask` of the last score
    sample: str | None = None  # beside the last one
    problem: str | None = None  # in one line


class Scores:
    """The folder of scores, for either side."""

    def __init__(self, workdir: pathlib.Path) -> None:
        self._lock = workdir / EVALUATOR_LOCK
        self._lines, self._wanted = workdir / FOLDER / "scores.jsonl", workdir / FOLDER / "wanted.json"
        self._read = 0  # bytes

    def add(self, scored: Scored) -> None:
        """Adds a line; for the evaluator. Raises OSError."""
        file = GrowingFile(self._lines)
        file.append(json.dumps(dataclasses.asdict(scored), default=float).encode() + b"\n")
        file.close()

    def new(self) -> list[Scored]:
        """The scores since the last call; for the syncer."""
        try:
            with self._lines.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + len(end)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found.append(Scored(**json.loads(line)))
        return found

    def want(self, wanted: Wanted) -> None:
        """Writes which score is the last; for the syncer. Raises OSError."""
        self._wanted.parent.mkdir(exist_ok=True)
        array_file.replace(self._wanted, [json.dumps(wanted._asdict()).encode()])

    def wanted(self) -> Wanted | None:
        """The last score that the syncer wants, if it has written that."""
        try:
            values: dict[str, Any] = json.loads(self._wanted.read_text())
            return Wanted(**{**values, "versions": tuple(values["versions"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextlib.contextmanager
    def attending(self) -> Iterator[bool]:
        """Marks an evaluator as present until the `with` block or this process ends.

        Gives False if there is one already.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as file:
            yield take(file.fileno())

    def attended(self) -> bool | None:
        """Whether there is an evaluator at present; None: there has never been one in this workdir."""
        return is_locked(self._lock)
