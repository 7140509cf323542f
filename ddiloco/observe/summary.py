"""`summary.json`: the figures of a run, refreshed while it runs and complete at its end."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.observe import performance
from ddiloco.observe.files import replacing
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
    begun, ended = window or (started, now)
    seconds = ended - begun
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
        "tokens": tally.tokens_by_learner,
        "tokens_per_second": tally.tokens / seconds if seconds > 0 else None,
        "started": started,
        "wall_seconds": now - started,
        **performance.summary(tally.performance),
        "train_loss": tally.train_loss(),
        "eval_loss": last.loss if last else None,
        **({f"eval_{name}": value for name, value in last.statistics.items()} if last else {}),
        "eval_history": [_evaluation(record, started) for record in tally.evaluations],
        "rounds": rounds.count,
        "outer_steps": {f: rounds.by_fragment[f] for f in {*range(info.num_fragments), *rounds.by_fragment}},
        "mean_quorum": rounds.mean_quorum(),
        "min_quorum": min(rounds.quorums, default=None),
        "max_quorum": max(rounds.quorums, default=None),
        "merged_share": tally.merged_share(),
        "merged_share_by_learner": tally.merged_shares(),
        "mean_grace_seconds": rounds.grace_seconds / rounds.count if rounds.count else None,
        "goodput": lines.goodput(now) if window else None,
        "uptime": lines.uptime(now) if window else None,
        "lost": lines.lost(now) if window else {},
        "learner_blocked_seconds": lines.blocked_seconds(now),
        **tally.counts,
        "bytes_sent_by_learner": dict(sorted(tally.sent_by_learner.items())),
        "bytes_received_by_learner": dict(sorted(tally.received_by_learner.items())),
        "inner_states": dict(sorted(tally.inner_states.items())),
        "drops": dict(sorted(tally.drops.items())),
        "offers_left_out": dict(sorted(rounds.left_out.items())),
        "quarantined": sorted(tally.quarantined),
        "failures": [dataclasses.asdict(death) for death in tally.failures],
        "alarms": alarms,
        "params_sha256": None,
        "finished": tally.complete,
        "interrupted": False,
    }
    return as_json(values)


def write_summary(path: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Replaces the file in one step; raises OSError if the disk refuses, and then keeps the old one."""
    with replacing(path) as new:
        new.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")


def read_summary(path: pathlib.Path) -> dict[str, Any]:
    """What is in the file; empty if there is none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _evaluation(record: Any, started: float) -> dict[str, Any]:
    return {
        "step": record.step,
        "tokens": record.tokens,
        "seconds": record.time - started,
        "loss": record.loss,
        **record.statistics,
    }
