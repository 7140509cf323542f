"""What earlier processes of the same run have left in the workdir, taken up by the one that goes on."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.observe.records import Evaluated, Noted, StateChanged, StepDone
from ddiloco.observe.tally import Tally


def recall(workdir: pathlib.Path, tally: Tally) -> None:
    """Adds what the files of the earlier processes tell to the tally of this one.

    Steps, tokens, states and rounds are whole; losses of single steps are not kept in files, so that curves
    begin anew. Counts that no file has a line for, as of bytes, and the evaluations are those of the last
    summary, 2 seconds old at most. Of a learner that the run no longer has only steps and tokens count.
    A line that cannot be read, as the last one after a crash, is passed over.
    """
    moments = []
    for line in _lines(workdir / "states.jsonl"):
        state = StateChanged(int(line["learner"]), State(line["state"]), line["time"], line["chips"])
        moments.append(state.time)
        if state.learner in tally.info.chips_by_learner:
            tally.state_changed(state)
    for path in sorted((workdir / "learners").glob("*/steps.jsonl")):
        if path.parent.name.isdigit():
            for line in _lines(path):
                learner = int(path.parent.name)
                tally.step_done(StepDone(learner, line["step"], line["time"], line["tokens"], {}))
    for line in _lines(workdir / "rounds.jsonl"):
        tally.noted(Noted("round", line, line["time"]))
    summary = next(_lines(workdir / "summary.json", whole=True), {})
    tally.bytes_sent += int(summary.get("bytes_sent", 0))
    tally.bytes_received += int(summary.get("bytes_received", 0))
    tally.skipped_steps += int(summary.get("skipped_steps", 0))
    tally.rounds.skipped += int(summary.get("rounds_skipped", 0))
    tally.rounds.abandoned += int(summary.get("rounds_abandoned", 0))
    tally.snapshots += int(summary.get("snapshots", 0))
    tally.snapshots_given_up += int(summary.get("snapshots_given_up", 0))
    tally.drops.update(summary.get("drops", {}))
    tally.inner_states.update(summary.get("inner_states", {}))
    if moments:
        tally.started = min(moments)
    for score in summary.get("eval_history", []):
        tally.evaluations.append(_evaluation(dict(score), tally.started or 0.0))


def _evaluation(score: dict[str, Any], started: float) -> Evaluated:
    step, tokens, seconds, loss = (score.pop(name) for name in ("step", "tokens", "seconds", "loss"))
    return Evaluated(step, tokens, started + seconds, math.nan if loss is None else loss, score)


def _lines(path: pathlib.Path, whole: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON values of a file, a line each, or the file as one."""
    try:
        text = path.read_text()
    except OSError:
        return
    for line in [text] if whole else text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
