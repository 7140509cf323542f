"""Algorithms and outer optimizers beside each other, each with its own best settings, and data-parallel.

  python -m experiments.tune --config=configs/methods.py --output=runs/tune-methods

Of the micro dense model (configs/micro.py) at 20 tokens a parameter, with Muon inside, at the batch that
configs/sweeps/muon.py found; learners meet every 24 steps. Outcome: docs/results/methods.md.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import baselines, micro

SETTINGS = {
    "inner.optimizer": "muon",
    "inner.final_fraction": 0.0,
    "train.batch_size": 2,  # rows
    "train.tokens": 2_513_920,  # 20 a parameter
    "data.interleave": 128,
    "eval.num_batches": 64,
    "virtual.step_variation": baselines.STEP_VARIATION,
}
ROUNDS = 102  # of each fragment
NESTEROV = {"outer.learning_rate": 0.5, "outer.momentum": 0.3}
METHODS = {  # algorithm, what else the method has, and where the climb on each of its own axes begins
    "DiLoCo": ("diloco", {}, NESTEROV),
    "Streaming DiLoCo": ("streaming", {"outer.optimizer": "nesterov"}, NESTEROV),
    "decoupled": ("decoupled", {}, NESTEROV),
    "decoupled, direct": ("decoupled", {"outer.optimizer": "direct"}, {}),
    "decoupled, rate to 1": ("decoupled", {"outer.rate_rounds": ROUNDS, "outer.final_rate": 1.0}, NESTEROV),
    "decoupled, delayed Nesterov": ("decoupled", {"outer.optimizer": "delayed_nesterov"}, NESTEROV),
    "decoupled, HeLoCo": ("decoupled", {"outer.optimizer": "heloco"}, NESTEROV),
}


def get_config(preset: str = "decoupled") -> ConfigDict:
    """The settings of configs/micro.py, of this algorithm."""
    config = micro.get_config(preset)
    config.update_from_flattened_dict(SETTINGS)
    return config


def get_tuning() -> dict[str, Any]:
    """Data-parallel, and each of METHODS."""
    rows = [_row("data-parallel", "data_parallel", {}, {})]
    rows += [_row(label, *method) for label, method in METHODS.items()]
    return {
        "rows": rows,
        "grid": {
            "inner.learning_rate": (0.006, 0.012, 0.024, 0.048),
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8),
        },
        "budget": 12,
        "choosing": baselines.CHOOSING,
    }


def _row(label: str, preset: str, has: dict[str, Any], begin: dict[str, float]) -> dict[str, Any]:
    row = {"label": label, "preset": preset, "inner.learning_rate": 0.024, **has, **begin}
    row["axes"] = ["inner.learning_rate", *begin]
    return row if label == "data-parallel" else {**row, "against": "data-parallel"}
