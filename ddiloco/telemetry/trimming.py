"""The files of a run cut back to the snapshot that it resumes from, so that nothing counts twice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.telemetry.files import read_json, read_lines, read_values, replacing, write_json

LOCK, EVALUATOR_LOCK = ".lock", ".evaluator.lock"
"""The process that has locked this file of a run's folder owns it; and the evaluator's."""

OWNERS = {LOCK, EVALUATOR_LOCK, "keys", "previous", "starts"}
"""What stays in a workdir whatever run is in it."""

SUMMARY, PLAN = "summary.json", "plan.json"
KEPT = {"snapshots", "learners", "metrics", "rounds.jsonl", "states.jsonl", "recoveries.jsonl"}
KEPT |= {"offers", "receipts"}
"""The files of a workdir that the resumed run continues."""

MADE_AGAIN = {"config.json", "environment.json", "events.jsonl", "availability.csv", "loss.png", "sample.txt"}
MADE_AGAIN |= {
    PLAN,
    "checkpoints",
    "evaluator",
    "export",
    "profile",
    "replay",
    "report.html",
    "syncer",
    "tape",
    "wandb",
}
"""Those that it makes again, or that are of the run as it was."""

FOLDERS = {"snapshots", "learners", "metrics", "checkpoints", "evaluator", "profile", "replay", "syncer"}
FOLDERS |= {"export", "offers", "receipts", "tape", "wandb"}
"""Those that are folders."""

OF_RUNS = KEPT | MADE_AGAIN | {SUMMARY}
"""All that runs make in a workdir; whatever else is there is the user's."""


@dataclasses.dataclass(frozen=True)
class TrimPoint:
    """Where a run is cut; a learner that is not in `states` is cut at `time`."""

    time: float  # of the syncer's state, in the records' clock
    versions: tuple[int, ...]  # by fragment, the merges that stay
    step: int  # the global step
    # By learner, its step in the state that it recorded, and when it did (its own seconds).
    states: Mapping[int, tuple[int, float]] = dataclasses.field(default_factory=dict)

    def at(self, learner: int) -> float:
        """Time at which the learner is cut (seconds)."""
        return self.states[learner][1] if learner in self.states else self.time


def trim(workdir: pathlib.Path, cut: TrimPoint) -> pathlib.Path:
    """Cuts the files of the run in the workdir back; a second call changes nothing more.

    What is cut off, and all that the resumed run makes again, is moved to `workdir/previous/N`, which is
    returned. Raises OSError where the disk refuses.
    """
    target = next_previous(workdir)
    others = [path for path in workdir.glob("*") if path.name in MADE_AGAIN]
    for path in (*others, *workdir.glob("learners/*/state.*")):  # those are of a later step
        shutil.move(path, _made(target / path.relative_to(workdir)))
    names = ("rounds.jsonl", "states.jsonl", "recoveries.jsonl")
    for path in (*workdir.glob("learners/[0-9]*/steps.jsonl"), *(workdir / name for name in names)):
        if path.is_file():
            _split(path, target / path.relative_to(workdir), cut)
    if (workdir / SUMMARY).exists():  # it stays until it is replaced, so that a kill loses none of its counts
        shutil.copy2(workdir / SUMMARY, _made(target / SUMMARY))
    earlier = read_json(workdir / SUMMARY)
    scores = [score for score in earlier.get("eval_history", []) if score["step"] <= cut.step]
    begun_anew = {**earlier, "eval_history": scores, "alarms": [], "finished": False} if earlier else {}
    write_json(workdir / SUMMARY, begun_anew)
    return target


def next_previous(workdir: pathlib.Path) -> pathlib.Path:
    """A folder `previous/N` that does not exist yet."""
    previous = workdir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    return previous / str(number)


def _split(path: pathlib.Path, gone_to: pathlib.Path, cut: TrimPoint) -> None:
    """Leaves the lines that stay, and moves the others and torn ones to `gone_to`, if there are any."""
    stays, number = _stays(path, cut), 0
    states: dict[int, str] = {}  # by learner, the last
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(stack.enter_context(replacing(path)).open("w"))
        gone = None
        for line, values in read_lines(path):
            if values and stays(number, values):
                kept.write(line)
                states |= {values["learner"]: values["state"]} if path.name == "states.jsonl" else {}
            else:
                gone = gone or stack.enter_context(_made(gone_to).open("w"))
                gone.write(line)
            number += bool(values)
        kept.writelines(_ends(states, cut))
        kept.flush()
        os.fsync(kept.fileno())  # the only lines of what the snapshot holds


def _stays(path: pathlib.Path, cut: TrimPoint) -> Callable[[int, Mapping[str, Any]], bool]:
    """A predicate for lines, by number, torn ones not counted, and values: whether a line is kept."""
    if path.name == "steps.jsonl" and int(path.parent.name) in cut.states:
        place = _place(read_values(path), *cut.states[int(path.parent.name)])
        return lambda number, _: number < place
    if path.name == "rounds.jsonl":
        return lambda _, values: values["version"] <= cut.versions[values["fragment"]]
    return lambda _, values: values["time"] < cut.at(values.get("learner", -1))


def _place(lines: Iterable[Mapping[str, Any]], step: int, time: float) -> int:
    """How many lines of a learner's steps lead to its state at `step`, recorded at `time`.

    Steps under way at that time are in the state, and their lines are later. Where a learner that came back
    passed the step more than once, it is the time nearest to `time`.
    """
    place, nearest = 0, math.inf
    pairs = itertools.pairwise(itertools.chain(lines, [{"step": math.inf}]))
    for number, (line, following) in enumerate(pairs, 1):
        if line["step"] <= step < following["step"] and abs(line["time"] - time) < nearest:
            place, nearest = number, abs(line["time"] - time)
    return place


def _ends(states: Mapping[int, str], cut: TrimPoint) -> Iterator[str]:
    """Lines by which every learner is down from its cut on, since nothing that it did later counts."""
    for learner, state in sorted(states.items()):
        if state != State.FAILED.value:
            end = {"time": cut.at(learner), "learner": learner, "state": State.FAILED.value, "chips": None}
            yield json.dumps(end) + "\n"


def _made(path: pathlib.Path) -> pathlib.Path:
    """The path, after making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
