"""What a run moved over the links between its learners: counted, or for one job of all chips computed."""

from __future__ import annotations

import bisect
import operator
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.telemetry.files import read_json, read_values

PARAMETER_BYTES = 4  # of an element of the parameters that a learner is welcomed with


def moved(workdir: pathlib.Path, summary: Mapping[str, Any]) -> tuple[float | None, list[float | None]]:
    """Bytes that crossed the links, each counted once: of the whole run, and up to each evaluation.

    The decoupled family's are those of its wire, to the syncer and from it. Between evaluations they are
    shared out by the merges in `rounds.jsonl`, as if all fragments had one size. Data-parallel training
    has no wire here: it is counted as a ring all-reduce among M learners that exchange bfloat16 gradients,
    2 (M - 1) * 2 bytes a parameter and step. None where summary or settings lack what it takes.
    """
    from ddiloco.baselines.virtual import ring_bytes

    scores = summary.get("eval_history", [])
    learners = read_json(workdir / "config.json").get("sync", {}).get("num_learners")
    if learners is None:
        return None, [None] * len(scores)
    if summary.get("algorithm") in ("data_parallel", "elastic_data_parallel"):
        if not summary.get("num_params"):
            return None, [None] * len(scores)
        a_step = learners * ring_bytes(summary["num_params"], learners)
        return a_step * summary["step"], [a_step * score["step"] for score in scores]
    sent, received = summary.get("bytes_sent"), summary.get("bytes_received")
    if sent is None or received is None:
        return None, [None] * len(scores)
    rounds = sorted(read_values(workdir / "rounds.jsonl"), key=operator.itemgetter("step"))
    welcomes = PARAMETER_BYTES * learners * (summary.get("num_params") or 0)
    welcomes = min(welcomes, received)
    steps = [line["step"] for line in rounds]
    up, down = [0], [0]  # fragments so far
    for line in rounds:
        up.append(up[-1] + line["quorum"])
        down.append(down[-1] + line["live"])

    def until(step: int) -> float:
        done = bisect.bisect_right(steps, step)
        updates = (received - welcomes) * _share(down, done)
        return welcomes + sent * _share(up, done) + updates

    return sent + received, [until(score["step"]) for score in scores]


def _share(so_far: list[int], done: int) -> float:
    return so_far[done] / so_far[-1] if so_far[-1] else 0.0
