"""RDA, of embeddings too or not, against direct averaging, each with its own best outer rate and momentum.

  python -m experiments.tune --config=configs/merge_rule.py --output=runs/tune-merge_rule

Of the micro dense model (configs/micro.py) at an equal global batch of 32 rows. Both at one rate:
configs/sweeps/merge_rule.py. Its outcome: docs/results/quality.md.
"""

from typing import Any

from configs import baselines, micro

ROWS = 32  # of all learners together
LEARNERS = (4, 8, 16)
RULES = {  # of the layers; of embeddings and head
    "direct": ("direct", "direct"),
    "RDA": ("rda", "direct"),
    "RDA of all": ("rda", "rda"),
}


get_config = micro.get_config


def get_tuning() -> dict[str, Any]:
    """Each rule with each number of learners."""
    return {
        "rows": [_row(learners, label) for learners in LEARNERS for label in RULES],
        "grid": {
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8),
        },
        "budget": 5,  # points: both axes are tried to both sides
        "choosing": baselines.CHOOSING,
    }


def _row(learners: int, label: str) -> dict[str, Any]:
    merge, embeddings = RULES[label]
    return {
        "label": f"{label}, M={learners}",
        "preset": "dense",
        "sync.num_learners": learners,
        "train.batch_size": ROWS // learners,
        "outer.merge": merge,
        "outer.embeddings": embeddings,
        "outer.learning_rate": 0.7,
        "outer.momentum": 0.3,
        "axes": ["outer.learning_rate", "outer.momentum"],
        **({} if label == "direct" else {"against": f"direct, M={learners}"}),
    }
