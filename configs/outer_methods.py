"""Outer optimizers beside each other, each with its own best settings, and data-parallel.

  python -m experiments.tune --config=configs/outer_methods.py --output=runs/tune-outer_methods

Of the micro dense model (configs/micro.py) at 20 tokens a parameter, with Muon inside, at the batch that
configs/sweeps/muon.py found; learners meet every 24 steps. Its outcome: docs/results/tuning.md.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import baselines, micro

METHODS = {  # what each has, and where the climb on each of its own axes begins
    "Nesterov": ({}, {"outer.learning_rate": 0.5, "outer.momentum": 0.3}),
    "direct": ({"outer.optimizer": "direct"}, {}),
    "moving average": (
        {"outer.optimizer": "moving_average"},
        {"outer.learning_rate": 0.7, "outer.momentum": 0.3},
    ),
    "persistence": ({"outer.optimizer": "persistence"}, {"outer.target": 0.7, "outer.momentum": 0.3}),
    "Nesterov, RDA of all": (
        {"outer.embeddings": "rda"},
        {"outer.learning_rate": 0.5, "outer.momentum": 0.3},
    ),
    "Nesterov, averaged": ({"outer.merge": "direct"}, {"outer.learning_rate": 0.5, "outer.momentum": 0.3}),
}


def get_config(preset: str = "decoupled") -> ConfigDict:
    """The settings of configs/micro.py, of this algorithm."""
    config = micro.get_config(preset)
    config.inner.optimizer = "muon"
    config.inner.final_fraction = 0.0
    config.train.batch_size = 2
    config.train.tokens = 2_513_920
    config.data.interleave = 128
    config.eval.num_batches = 64
    config.virtual.step_variation = baselines.STEP_VARIATION
    return config


def get_tuning() -> dict[str, Any]:
    """Data-parallel, and Decoupled DiLoCo with each of METHODS."""
    rows = [_row("data-parallel", "data_parallel", {}, {})]
    rows += [_row(label, "decoupled", has, begin) for label, (has, begin) in METHODS.items()]
    return {
        "rows": rows,
        "grid": {
            "inner.learning_rate": (0.006, 0.012, 0.024, 0.048),
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.target": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8),
        },
        "budget": 12,
        "choosing": baselines.CHOOSING,
    }


def _row(label: str, preset: str, has: dict[str, Any], begin: dict[str, float]) -> dict[str, Any]:
    row = {"label": label, "preset": preset, "inner.learning_rate": 0.024, **has, **begin}
    row["axes"] = ["inner.learning_rate", *begin]
    return row if label == "data-parallel" else {**row, "against": "data-parallel"}
