"""The files of a run cut back to the snapshot that it resumes from, so that nothing counts twice."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping

from ddiloco.goodput.accounting import State
from ddiloco.observe.files import read_json, read_lines, replacing, write_json
from ddiloco.observe.owner import LOCK

EVALUATOR_LOCK = ".evaluator.lock"
OWNERS = {LOCK, EVALUATOR_LOCK, "previous"}
"""What stays in a workdir whatever run is in it."""

SUMMARY = "summary.json"
KEPT = {"snapshots", "learners", "metrics", "rounds.jsonl", "states.jsonl", "recoveries.jsonl"} | OWNERS
"""The files of a workdir that the resumed run continues; it makes the others again."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a run is cut; a learner that is not in the mappings is cut at `time`."""

    time: float  # of the syncer's state, in the records' clock
    versions: tuple[int, ...]  # by fragment, the merges that stay
    step: int  # the global step
    # By learner, when it recorded its state, and the steps that it had started by then and finished later.
    times: Mapping[int, float] = dataclasses.field(default_factory=dict)
    unfinished: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def at(self, learner: int) -> float:
        """When the learner is cut (seconds)."""
        return self.times.get(learner, self.time)


def trim(workdir: pathlib.Path, cut: Cut) -> pathlib.Path:
    """Cuts the files of the run in the workdir back; a second call changes nothing more.

    What is cut off, and all that the resumed run makes again, is moved to `workdir/previous/N`, which is
    returned. Raises OSError where the disk refuses.
    """
    target = next_previous(workdir)
    others = [path for path in workdir.glob("*") if path.name not in (*KEPT, SUMMARY)]
    for path in (*others, *workdir.glob("learners/*/inner_state")):  # those are of a later step
        shutil.move(path, _made(target / path.relative_to(workdir)))
    names = ("rounds.jsonl", "states.jsonl", "recoveries.jsonl")
    for path in (*workdir.glob("learners/[0-9]*/steps.jsonl"), *(workdir / name for name in names)):
        kept, gone = _split(path, cut)
        if gone:
            _made(target / path.relative_to(workdir)).write_text("".join(gone))
        if path.name == "states.jsonl":
            kept += _ends(kept, cut)
        if path.is_file():
            with replacing(path) as new:
                new.write_text("".join(kept))
    if (workdir / SUMMARY).exists():  # it stays until it is replaced, so that a kill loses none of its counts
        shutil.copy2(workdir / SUMMARY, _made(target / SUMMARY))
    earlier = read_json(workdir / SUMMARY)
    scores = [score for score in earlier.get("eval_history", []) if score["step"] <= cut.step]
    begun_anew = {**earlier, "eval_history": scores, "finished": False} if earlier else {}
    write_json(workdir / SUMMARY, begun_anew)
    return target


def next_previous(workdir: pathlib.Path) -> pathlib.Path:
    """A folder `previous/N` that does not exist yet."""
    previous = workdir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    return previous / str(number)


def _split(path: pathlib.Path, cut: Cut) -> tuple[list[str], list[str]]:
    """The lines that stay, and those that go; torn ones go too."""
    of_steps = path.name == "steps.jsonl"
    learner = int(path.parent.name) if of_steps else -1
    unfinished = cut.unfinished.get(learner, 0)
    kept, gone = [], []
    for line, values in read_lines(path):
        if path.name == "rounds.jsonl":
            stays = bool(values) and values["version"] <= cut.versions[values["fragment"]]
        else:
            stays = bool(values) and values["time"] < cut.at(values.get("learner", learner))
        if of_steps and values and not stays and unfinished:
            stays, unfinished = True, unfinished - 1
        (kept if stays else gone).append(line)
    return kept, gone


def _ends(lines: list[str], cut: Cut) -> list[str]:
    """Lines by which every learner is down from its cut on, since nothing that it did later counts."""
    last = {values["learner"]: values["state"] for values in map(json.loads, lines)}
    return [
        json.dumps({"time": cut.at(learner), "learner": learner, "state": State.FAILED.value, "chips": None})
        + "\n"
        for learner, state in sorted(last.items())
        if state != State.FAILED.value
    ]


def _made(path: pathlib.Path) -> pathlib.Path:
    """The path, after making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
