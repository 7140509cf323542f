"""The tiny dense model with each algorithm at its best batch and rates: docs/results/tuning.md.

  python -m experiments.train --config=configs/tuned.py[:ALGORITHM][,INNER][,LENGTH] [--config.FIELD=VALUE]
  python -m experiments.compare --config=configs/tuned.py[:INNER][,LENGTH] --output=runs/tuned

ALGORITHM
  decoupled (default), data_parallel
INNER
  muon (default), adamw
LENGTH
  short  the tokens of configs/dense.py:tiny, 2.4 a parameter; five minutes a run on a core (default)
  long   20 tokens a parameter, 128 documents side by side; not decoupled with AdamW; 20 to 100 minutes a run

What is best at one length is not at the other. In short runs learners meet every 6 steps, which is four times
the bytes of the paper's 24 and about two thirds of the gap to data-parallel; --config.sync.interval=24 has
those. In long ones they meet every 2 steps, in four bits both ways.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from configs import baselines, dense, sections

ALGORITHMS, INNER, LENGTHS = ("decoupled", "data_parallel"), ("muon", "adamw"), ("short", "long")
OFTEN, PAPERS = {"short": 6, "long": 2}, 24  # steps between two meetings
STEPS = {"short": 480, "long": 3936}  # if each had the preset's 8 rows a learner


class Point(NamedTuple):
    """What was tuned, but for the outer optimizer, which came out the same everywhere."""

    rows: int  # a learner's, of each step
    rate: float  # peak inner learning rate
    left: float = 0.1  # share of it at the end


POINTS = {
    ("data_parallel", "adamw", "short"): Point(1, 0.003),
    ("data_parallel", "muon", "short"): Point(2, 0.006),
    ("decoupled", "adamw", "short"): Point(2, 0.006),
    ("decoupled", "muon", "short"): Point(4, 0.012),
    ("data_parallel", "adamw", "long"): Point(2, 0.006, left=0.0),
    ("data_parallel", "muon", "long"): Point(2, 0.012, left=0.0),
    ("decoupled", "muon", "long"): Point(4, 0.012, left=0.0),
}


def get_config(preset: str = "decoupled,muon,short") -> ConfigDict:
    """The settings of `ALGORITHM,INNER,LENGTH`; any of them may be left out."""
    algorithm, inner, length = sections.words(preset, ALGORITHMS, INNER, LENGTHS)
    if (algorithm, inner, length) not in POINTS:
        raise ValueError(f"no preset {preset!r}: {algorithm} with {inner} was not tuned for {length} runs")
    point = POINTS[algorithm, inner, length]
    config = dense.get_config(f"tiny,{algorithm}")
    config.train.steps = STEPS[length] * config.train.batch_size // point.rows  # as many tokens
    config.train.batch_size = point.rows
    config.inner.optimizer = inner
    config.inner.learning_rate, config.inner.final_fraction = point.rate, point.left
    if algorithm == "decoupled":
        config.sync.interval = OFTEN[length]
        config.outer.learning_rate, config.outer.momentum = 0.5, 0.3
    config.data.interleave = 128 if length == "long" else 8  # as each was tuned
    if length == "long":
        config.eval.every = 480
        config.outer.codec = config.outer.update_codec = "int4"
    return config


def get_comparison(preset: str = "muon,short") -> list[dict]:
    """Data-parallel, and Decoupled DiLoCo whose learners meet as often as is best, and every 24 steps."""
    inner, length = sections.words(preset, INNER, LENGTHS)
    run = {
        "driver": "virtual",
        "virtual.step_variation": baselines.STEP_VARIATION,
        "train.tokens": baselines.budget(get_config(f"decoupled,{inner},{length}")),
    }
    return [
        {"label": "data-parallel", "preset": f"data_parallel,{inner},{length}", **run},
        *(
            {
                "label": f"decoupled, H={h}",
                "preset": f"decoupled,{inner},{length}",
                "sync.interval": h,
                "against": "data-parallel",
                **run,
            }
            for h in (OFTEN[length], PAPERS)
        ),
    ]
