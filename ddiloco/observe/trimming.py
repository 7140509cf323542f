"""The files of a run cut back to the snapshot that it goes on from, so that nothing counts twice."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddiloco.goodput.accounting import State

KEPT = {"snapshots", "previous", "learners", "metrics", "rounds.jsonl", "states.jsonl", "recoveries.jsonl"}
"""What of a workdir the resumed run goes on below; the rest it makes anew."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a run is cut; a learner that is not in the mappings is cut at `time`.

    Attributes:
      time: of the syncer's state, in the records' clock.
      versions: by fragment, the merges that stay.
      times: by learner, when it recorded its state.
      unfinished: by learner, the steps that it had started by then and finished later.
      step: the global step.
    """

    time: float
    versions: tuple[int, ...]
    step: int
    times: Mapping[int, float] = dataclasses.field(default_factory=dict)
    unfinished: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at(self, learner: int) -> float:
        """When the learner's record ends."""
        return self.times.get(learner, self.time)


def trim(workdir: pathlib.Path, cut: Cut) -> pathlib.Path:
    """Cuts the files of the run in the workdir back; done twice, it changes nothing more.

    What is cut off, and all that the resumed run makes anew, is in `workdir/previous/N` then.

    Returns:
      That folder.

    Raises:
      OSError: the disk refuses.
    """
    target = next_previous(workdir)
    for path in workdir.glob("*"):
        if path.name not in KEPT:
            target.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / path.name)
    for path in workdir.glob("learners/*/inner_state"):  # of a later step than the snapshot
        place = target / path.relative_to(workdir)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
    for path in _records(workdir):
        kept, gone = _split(path.read_text().splitlines(keepends=True), path.relative_to(workdir), cut)
        if gone:
            tail = target / path.relative_to(workdir)
            tail.parent.mkdir(parents=True, exist_ok=True)
            tail.write_text("".join(gone))
            _replace(path, "".join(kept))
    _end_states(workdir / "states.jsonl", cut)
    summary = _earlier(target / "summary.json", cut)
    _replace(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return target


def next_previous(workdir: pathlib.Path) -> pathlib.Path:
    """A folder `previous/N` that is not there yet."""
    previous = workdir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    return previous / str(number)


def _records(workdir: pathlib.Path) -> list[pathlib.Path]:
    steps = [p for p in workdir.glob("learners/*/steps.jsonl") if p.parent.name.isdigit()]
    of_the_run = [workdir / name for name in ("rounds.jsonl", "states.jsonl", "recoveries.jsonl")]
    return [path for path in (*sorted(steps), *of_the_run) if path.is_file()]


def _split(lines: list[str], name: pathlib.Path, cut: Cut) -> tuple[list[str], list[str]]:
    """The lines that stay, and those that do not."""
    if name.name == "steps.jsonl":
        learner = int(name.parent.name)
        before = _first(lines, lambda told: told["time"] >= cut.at(learner))
        count = before + cut.unfinished.get(learner, 0)
    elif name.name == "rounds.jsonl":
        count = _first(lines, lambda told: told["version"] > cut.versions[told["fragment"]])
    else:
        stays = [_holds(line, lambda told: told["time"] < cut.at(told.get("learner", -1))) for line in lines]
        return _where(lines, stays), _where(lines, (not kept for kept in stays))
    return lines[:count], lines[count:]


def _where(lines: list[str], chosen: Iterable[bool]) -> list[str]:
    return [line for line, is_chosen in zip(lines, chosen, strict=True) if is_chosen]


def _first(lines: list[str], past: Callable[[dict[str, Any]], bool]) -> int:
    """The number of lines before the first that is past the cut."""
    return next((i for i, line in enumerate(lines) if _holds(line, past)), len(lines))


def _holds(line: str, question: Callable[[dict[str, Any]], bool]) -> bool:
    """What the question says of the line; not of one that a crash has torn."""
    try:
        return question(json.loads(line))
    except (ValueError, TypeError, LookupError):
        return False


def _end_states(path: pathlib.Path, cut: Cut) -> None:
    """Notes that every learner was down from its cut on, since nothing that it did then counts."""
    last: dict[int, dict[str, Any]] = {}
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    for line in lines:
        try:
            told = json.loads(line)
            last[told["learner"]] = told
        except (ValueError, TypeError, LookupError):
            continue
    down = [
        {"time": cut.at(learner), "learner": learner, "state": State.FAILED.value, "chips": None}
        for learner, told in sorted(last.items())
        if told.get("state") != State.FAILED.value
    ]
    if down:
        _replace(path, "".join(lines) + "".join(json.dumps(told) + "\n" for told in down))


def _earlier(path: pathlib.Path, cut: Cut) -> dict[str, Any]:
    """The last summary, without the scores of steps past the cut."""
    try:
        summary = json.loads(path.read_text())
        scores = [score for score in summary.get("eval_history", []) if score["step"] <= cut.step]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
    return {**summary, "eval_history": scores}


def _replace(path: pathlib.Path, content: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(content)
    os.replace(new, path)
