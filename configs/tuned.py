"""The tiny dense model at tuned batches and rates, long runs by few points: docs/results/quality.md.

  python -m experiments.train --config=configs/tuned.py[:ALGORITHM][,INNER][,LENGTH] [--config.FIELD=VALUE]
  python -m experiments.compare --config=configs/tuned.py[:LENGTH] --output=runs/tuned
  python -m experiments.tune --config=configs/tuned.py --output=runs/tune-tuned

ALGORITHM
  decoupled (default), data_parallel
INNER
  muon (default), adamw; decoupled has Muon alone
LENGTH
  short  the tokens of configs/dense.py:tiny, 2.4 a parameter; 5 to 10 minutes a run on a core (default)
  long   20 tokens a parameter; with Muon the best of three points each; 20 to 100 minutes a run

All read 512 documents side by side, and their inner rate goes down to 0. Learners meet every 2 steps, in four
bits both ways; --config.sync.interval=24 has the paper's. The last command finds the points of short runs
again, in about two hours on two cores.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import baselines, dense, sections
from ddiloco.config import ConfigError

ALGORITHMS, INNER, LENGTHS = ("decoupled", "data_parallel"), ("muon", "adamw"), ("short", "long")
STEPS = {"short": 480, "long": 3936}  # if each had the preset's 8 rows a learner


class Point(NamedTuple):
    """What was tuned; the outer momentum is 0.3, which came out the same everywhere."""

    rows: int  # a learner's, of each step
    rate: float  # peak inner learning rate
    outer: float = 0.5  # outer learning rate


POINTS = {
    ("data_parallel", "muon", "short"): Point(2, 0.006),
    ("data_parallel", "adamw", "short"): Point(1, 0.003),
    ("decoupled", "muon", "short"): Point(4, 0.024, outer=0.35),
    ("data_parallel", "muon", "long"): Point(4, 0.012),
    ("data_parallel", "adamw", "long"): Point(2, 0.006),
    ("decoupled", "muon", "long"): Point(8, 0.024, outer=0.35),
}


def get_config(preset: str = "decoupled,muon,short") -> ConfigDict:
    """The settings of `ALGORITHM,INNER,LENGTH`; any of them may be left out."""
    algorithm, inner, length = sections.words(preset, ALGORITHMS, INNER, LENGTHS)
    if (algorithm, inner, length) not in POINTS:
        raise ConfigError(f"no preset {preset!r}: {algorithm} was not tuned with {inner}")
    point = POINTS[algorithm, inner, length]
    config = dense.get_config(f"tiny,{algorithm}")
    config.train.steps = STEPS[length] * config.train.batch_size // point.rows  # as many tokens
    config.train.batch_size = point.rows
    config.inner.optimizer = inner
    config.inner.learning_rate, config.inner.final_fraction = point.rate, 0.0
    if algorithm == "decoupled":
        config.sync.interval = 2
        config.outer.learning_rate, config.outer.momentum = point.outer, 0.3
        config.outer.codec = config.outer.update_codec = "int4"
    if length == "long":
        config.eval.every = 480
    return config


def get_comparison(length: str = "short") -> list[dict[str, Any]]:
    """Data-parallel, and Decoupled DiLoCo whose learners meet as often as is best, and every 24 steps."""
    (length,) = sections.words(length, LENGTHS)
    rows = {
        "data-parallel": {"preset": f"data_parallel,muon,{length}"},
        "data-parallel, AdamW": {"preset": f"data_parallel,adamw,{length}", "against": "data-parallel"},
        "decoupled, H=2": {"preset": f"decoupled,muon,{length}", "against": "data-parallel"},
    }
    rows["decoupled, H=24"] = {**rows["decoupled, H=2"], "sync.interval": 24}  # the paper's
    run = {
        "driver": "virtual",
        "virtual.step_variation": baselines.STEP_VARIATION,
        "train.tokens": baselines.budget(get_config(f"decoupled,muon,{length}")),
    }
    return [{"label": label, **row, **run} for label, row in rows.items()]


def get_tuning(length: str = "short") -> dict[str, Any]:
    """The same but for the last, each scored at the end, from where its climb begins."""
    rate, rows, outer_rate = "inner.learning_rate", "train.batch_size", "outer.learning_rate"
    begin = [{rate: 0.012, rows: 2}, {rate: 0.003, rows: 1}, {rate: 0.012, rows: 4, outer_rate: 0.5}]
    *compared, _ = get_comparison(length)
    return {
        "rows": [
            {**row, **at, "axes": [*at], "eval.every": 0} for row, at in zip(compared, begin, strict=True)
        ],
        "grid": {
            rate: (0.0015, 0.003, 0.006, 0.012, 0.024, 0.048),
            rows: (1, 2, 4, 8),
            outer_rate: (0.25, 0.35, 0.5, 0.7, 1.0),
        },
        "together": [rate, rows],  # a larger batch wants a larger rate
        "budget": 12,
        "choosing": baselines.CHOOSING,
    }
