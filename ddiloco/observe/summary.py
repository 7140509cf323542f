"""`summary.json`: the figures of a run, refreshed while it runs and complete at its end."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.observe.scalars import as_json
from ddiloco.observe.tally import Tally


def summarize(tally: Tally, now: float, alarms: list[str]) -> dict[str, Any]:
    """The figures as of `now` (the records' clock), ready for JSON: None stands for NaN and for unknown.

    Seconds count from the start of the run; tokens a second are taken over the window of
    `ddiloco.goodput.accounting`, so that compilation before the first step does not dilute them.
    Bytes are from the learners' point of view. Losses are nats per token.
    """
    lines, rounds, info = tally.timelines, tally.rounds, tally.info
    started = now if tally.started is None else tally.started
    window = lines.window(now)
    last = tally.evaluations[-1] if tally.evaluations else None
    values = {
        "algorithm": info.algorithm,
        "seed": info.seed,
        "num_learners": info.num_learners,
        "num_params": info.num_params,
        "num_fragments": info.num_fragments,
        "total_steps": info.total_steps,
        "step": tally.step,
        "inner_steps": tally.steps_by_learner,
        "skipped_steps": tally.skipped_steps,
        "tokens": tally.tokens_by_learner,
        "tokens_per_second": _rate(tally.tokens, *(window or (started, now))),
        "wall_seconds": now - started,
        "train_loss": tally.train_loss(),
        "eval_loss": last.loss if last else None,
        **({f"eval_{name}": value for name, value in last.statistics.items()} if last else {}),
        "eval_history": [_evaluation(record, started) for record in tally.evaluations],
        "rounds": rounds.count,
        "rounds_skipped": rounds.skipped,
        "rounds_abandoned": rounds.abandoned,
        "outer_steps": {f: rounds.by_fragment[f] for f in {*range(info.num_fragments), *rounds.by_fragment}},
        "mean_quorum": rounds.mean_quorum(),
        "min_quorum": min(rounds.quorums, default=None),
        "max_quorum": max(rounds.quorums, default=None),
        "mean_grace_seconds": rounds.grace_seconds / rounds.count if rounds.count else None,
        "goodput": lines.goodput(now) if window else None,
        "uptime": lines.uptime(now) if window else None,
        "lost": lines.lost(now) if window else {},
        "learner_blocked_seconds": lines.blocked_seconds(now),
        "bytes_sent": tally.bytes_sent,
        "bytes_received": tally.bytes_received,
        "inner_states": dict(sorted(tally.inner_states.items())),
        "snapshots": tally.snapshots,
        "snapshots_given_up": tally.snapshots_given_up,
        "drops": dict(sorted(tally.drops.items())),
        "failures": [
            {"learner": death.learner, "time": death.time, "traceback": death.traceback}
            for death in tally.failures
        ],
        "alarms": alarms,
        "params_sha256": None,
        "finished": tally.complete,
        "interrupted": False,
    }
    return as_json(values)


def write_summary(path: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Replaces the file at once: a reader sees the old summary or the new one, never a part.

    Raises:
      OSError: the disk refused; the old summary still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _evaluation(record: Any, started: float) -> dict[str, Any]:
    return {
        "step": record.step,
        "tokens": record.tokens,
        "seconds": record.time - started,
        "loss": record.loss,
        **record.statistics,
    }


def _rate(amount: float, start: float, end: float) -> float | None:
    return amount / (end - start) if end > start else None
