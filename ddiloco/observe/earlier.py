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
    begin anew. Counts of bytes, drops and evaluations are those of the last summary, 2 seconds old at most.
    A line that cannot be read, as the last one after a crash, is passed over.
    """
    moments = []
    for line in _lines(workdir / "states.jsonl"):
        state = StateChanged(int(line["learner"]), State(line["state"]), line["time"], line["chips"])
        tally.state_changed(state)
        moments.append(state.time)
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
