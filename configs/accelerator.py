"""24 million parameters on 480 million tokens, 20 a parameter, with four learners that share one accelerator.

  python -m experiments.compare --config=configs/accelerator.py --output=runs/accelerator
  python -m experiments.train --config=configs/accelerator.py[:ALGORITHM][,EXCHANGE] --workdir=runs/mine

ALGORITHM
  decoupled (default), data_parallel
EXCHANGE
  frequent  every 6 steps in four bits, both ways (default)
  paper     every 24 steps in float32

The shape of configs/dense.py:small, its learners as threads. What is cut by SIGTERM goes on with the same
command. How its text is gathered and tokenized, what it takes and what was tried:
docs/results/accelerator.md#24m-parameters-on-480m-tokens.

Rates, and how many rows a side reads, are carried over from runs of 0.8M parameters at 20 tokens a parameter
(docs/results/quality.md, methods.md); nothing is tuned at this size. Inner rates are halved with that: a step
of Muon grows with the root of the width, which is four times as large. The weight decay is the default: over
the run, 1 / (rate * decay) steps are as long as there. More was better in short runs alone.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import dense, sections

ALGORITHMS = ("decoupled", "data_parallel")
TOKENS = 7325 * 65_536  # whole steps of each row
EVALUATIONS = 8


class Point(NamedTuple):
    """What was best, or as good as any, in runs of 0.8M parameters."""

    rate: float  # peak inner learning rate there
    rows: int  # a learner's, of each step: sixteen times as many tokens as there
    outer: tuple[float, float] = (0.7, 0.3)  # outer rate and momentum


POINTS = {
    "data_parallel": Point(0.012, 16),
    "frequent": Point(0.024, 32, (0.35, 0.3)),  # of H=2
    "paper": Point(0.012, 32),
}


def get_config(preset: str = "decoupled,frequent") -> ConfigDict:
    """The settings of `ALGORITHM,EXCHANGE`; either may be left out."""
    algorithm, exchange = sections.words(preset, ALGORITHMS, dense.EXCHANGES)
    config = dense.begin(f"small,{algorithm},{exchange}")
    point = POINTS[exchange if algorithm == "decoupled" else algorithm]
    config.model.scan_layers = True  # compiles one layer; Muon turns those of all at once
    config.data.name, config.data.tokenized = "./build/text/sources.jsonl.xz", "build/text/tokens"
    config.data.threads, config.data.prefetch = 4, 2  # steps of 20 ms do not wait for rows
    config.train.tokens, config.train.batch_size = TOKENS, point.rows
    config.inner.optimizer = "muon"
    config.inner.learning_rate, config.inner.final_fraction = point.rate / 2, 0.0
    config.outer.learning_rate, config.outer.momentum = point.outer
    steps = TOKENS // (config.sync.num_learners * point.rows * config.data.sequence_length)
    config.eval.every = -(-steps // EVALUATIONS)
    config.eval.batch_size = 64
    config.log.every = 32
    config.sample.tokens = 0
    return config


def get_comparison() -> list[dict[str, Any]]:
    """Data-parallel, and learners that meet as in the paper and as in this project's presets."""
    decoupled = {"against": "data-parallel"}
    return [
        {"label": "data-parallel", "preset": "data_parallel"},
        {"label": "decoupled, H=24, float32", "preset": "decoupled,paper", **decoupled},
        {"label": "decoupled, H=6, int4", "preset": "decoupled,frequent", **decoupled},
    ]
