"""Reads what earlier processes of the same run have left in the workdir."""

from __future__ import annotations

import collections
import math
import pathlib
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.observe.alarms import Alarms
from ddiloco.observe.files import read_json, read_values
from ddiloco.observe.records import Evaluated, LearnerDied, Noted, StateChanged, StepDone
from ddiloco.observe.tally import COUNTS, Tally


def recall(workdir: pathlib.Path, tally: Tally, alarms: Alarms) -> None:
    """Adds what is in the files of earlier processes to the tally and the alarms of this one.

    Steps, tokens, losses, states and rounds are complete. Counts without lines of their own, such as bytes,
    the evaluations and the alarms come from the last summary, at most 2 seconds old. Of a learner that the
    run no longer has only steps and tokens count. Lines that cannot be read, such as a torn last one, are
    skipped.
    """
    for path in sorted((workdir / "learners").glob("*/steps.jsonl")):
        if path.parent.name.isdigit():
            for line in read_values(path):
                learner = int(path.parent.name)
                counts = "loss" in line and not line.get("skipped")
                loss = {"loss": _number(line["loss"])} if counts else {}
                tally.step_done(StepDone(learner, line["step"], line["time"], line["tokens"], loss))
    moments = []
    for line in read_values(workdir / "states.jsonl"):  # after the steps, at which figures mark them
        state = StateChanged(int(line["learner"]), State(line["state"]), line["time"], line["chips"])
        moments.append(state.time)
        if state.learner in tally.info.chips_by_learner:
            tally.state_changed(state)
    for line in read_values(workdir / "rounds.jsonl"):
        tally.noted(Noted("round", line, line["time"]))
    summary = read_json(workdir / "summary.json")
    tally.counts.update({name: int(summary.get(name, 0)) for name in COUNTS})
    for name in ("sent", "received"):
        counted = summary.get(f"bytes_{name}_by_learner", {})
        getattr(tally, f"{name}_by_learner").update({int(m): count for m, count in counted.items()})
    tally.drops.update(summary.get("drops", {}))
    tally.inner_states.update(summary.get("inner_states", {}))
    # Lines of rounds have no offers of those that made no version.
    left_out = {int(m): count for m, count in summary.get("offers_left_out", {}).items()}
    tally.rounds.left_out |= collections.Counter(left_out)
    alarms.recall(summary.get("alarms", []))
    tally.failures += [LearnerDied(**death) for death in summary.get("failures", [])]
    if moments:
        tally.started = min(moments)
    for score in summary.get("eval_history", []):
        tally.evaluations.append(_evaluation(dict(score), tally.started or 0.0))


def _evaluation(score: dict[str, Any], started: float) -> Evaluated:
    step, tokens, seconds, loss = (score.pop(name) for name in ("step", "tokens", "seconds", "loss"))
    return Evaluated(step, tokens, started + seconds, _number(loss), score)


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss
