"""A run as a monitor hears of it, record by record, and the summary that belongs to it."""

import math

import jax.numpy as jnp
import pytest

from ddiloco.goodput.accounting import CAUSES, State
from ddiloco.telemetry.records import (
    Alarm,
    Evaluated,
    LearnerDied,
    Noted,
    StateChanged,
    StepDone,
    Transferred,
)

MEASURED = {"step_seconds": 2.5, "data_wait_seconds": 0.5, "mfu": 0.25, "peak_bytes/0": 7.0}
TRACEBACK = "Traceback (most recent call last):\n  in step\nValueError: no batch\n"


def step(learner, number, time=None, tokens=10, **metrics):
    return StepDone(learner, number, float(number) if time is None else time, tokens, metrics)


def put(monitor, *records):
    for record in records:
        monitor.queue.put(record)


def scripted():
    """Two learners of 4 chips; 1 dies at half-time, 0 goes on to the end. Seconds 5 to 20."""
    first = {"contributions": [[0, 1, 0, 2, 2, 200], [1, 1, 0, 2, 1, 50]]}
    second = {"contributions": [[0, 1, 0, 4, 4, 400]]}
    graces = {"quorum": 2, "grace_seconds": 0.5}, {"quorum": 1, "grace_seconds": 1.5}
    values = {"tokens": 1, "learners": (0, 1), "live": 2, "quorum_seconds": 0.1, "sync_seconds": 0.1}
    return [
        Evaluated(0, 0, 5.0, jnp.float32(6.0)),
        StateChanged(0, State.STEPPING, 10.0),
        StateChanged(1, State.STEPPING, 10.0),
        step(0, 1, 12.5, 100, loss=jnp.float32(4.0), skipped=jnp.int32(0)),
        step(1, 1, 12.5, 50, loss=5.0),
        step(1, 2, 15.0, 50, loss=math.nan, skipped=1),
        StateChanged(1, State.FAILED, 15.0),
        LearnerDied(1, 15.0, TRACEBACK),
        step(0, 2, 15.0, 100, loss=3.0, **MEASURED),
        Noted("round", {"step": 2, "fragment": 0, **graces[0], **values, **first}, 16.0),
        Noted("round_skipped", {"step": 3, "fragment": 1}, 16.0),
        Noted("round_abandoned", {"step": 3, "fragment": 2}, 16.0),
        *(Noted("drop", {"learner": 1, "reason": reason}, 17.0) for reason in ("stale", "late", "late")),
        step(0, 3, 17.5, 100, loss=2.0),
        Noted("round", {"step": 4, "fragment": 2, **graces[1], **values, **second}, 19.0),
        Transferred(0, 10, 20),
        Transferred(1, 1, 2),
        Alarm("an evaluation failed at step 2: ValueError: no device", 18.0),
        step(0, 4, 20.0, 100, loss=1.0),
        StateChanged(0, State.FINISHED, 20.0),
        Evaluated(4, 500, 20.0, 1.25, {"accuracy": jnp.float32(0.5)}),
    ]


SUMMARY = {
    "algorithm": "decoupled",
    "seed": 7,
    "num_learners": 2,
    "num_params": 1000,
    "num_fragments": 3,
    "total_steps": 4,
    "step": 4,
    "inner_steps": {"0": 4, "1": 2},
    "skipped_steps": 1,
    "tokens": {"0": 400, "1": 50},  # without those of the skipped step
    "tokens_per_second": 45.0,
    "started": 5.0,
    "wall_seconds": 15.0,
    "mfu": 0.25,
    "mfu_by_learner": {"0": 0.25, "1": None},
    "data_wait_share": 0.2,
    "data_wait_share_by_learner": {"0": 0.2, "1": None},
    "step_seconds_p50": pytest.approx(2.5, rel=0.01),
    "step_seconds_p99": pytest.approx(2.5, rel=0.01),
    "step_seconds_p50_by_learner": {"0": pytest.approx(2.5, rel=0.01), "1": None},
    "step_seconds_p99_by_learner": {"0": pytest.approx(2.5, rel=0.01), "1": None},
    "peak_memory_bytes": {"0": {"0": 7}},
    "train_loss": 1.0,
    "eval_loss": 1.25,
    "eval_accuracy": 0.5,
    "eval_history": [
        {"step": 0, "tokens": 0, "seconds": 0.0, "loss": 6.0},
        {"step": 4, "tokens": 500, "seconds": 15.0, "loss": 1.25, "accuracy": 0.5},
    ],
    "rounds": 2,
    "rounds_skipped": 1,
    "rounds_abandoned": 1,
    "outer_steps": {"0": 1, "1": 0, "2": 1},
    "mean_quorum": 1.5,
    "min_quorum": 1,
    "max_quorum": 2,
    "merged_share": 650 / 1350,
    "merged_shares": {"0": 600 / 1200, "1": 50 / 150},
    **dict.fromkeys(("merge_shock", "merge_shock_error", "merge_shock_steps", "merge_shock_kept")),
    "timing": None,
    "mean_grace_seconds": 1.0,
    "goodput": 0.625,
    "uptime": 1.0,
    "lost": {**{cause.value: 0.0 for cause in CAUSES}, "failed": 0.25, "skipping": 0.125},
    "learner_blocked_seconds": 0.0,
    "bytes_sent": 11,
    "bytes_received": 22,
    "bytes_sent_by_learner": {"0": 10, "1": 1},
    "bytes_received_by_learner": {"0": 20, "1": 2},
    "inner_states": {},
    "records_lost": 0,
    "snapshots": 0,
    "snapshots_given_up": 0,
    "drops": {"late": 2, "stale": 1},
    "work_overwritten": {},
    "offers_left_out": {},
    "quarantined": [],
    "failures": [{"learner": 1, "time": 15.0, "traceback": TRACEBACK}],
    "alarms": ["an evaluation failed at step 2: ValueError: no device"],
    "params_sha256": "abc",
    "finished": False,
    "interrupted": False,
}
