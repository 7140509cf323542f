"""The outer optimizer of each preset: plain averaging, and Nesterov's momentum at three settings.

  python -m experiments.sweep --sweep=configs/sweeps/outer_optimizer.py --output=runs/outer_optimizer

12 runs of half the tiny preset's length in virtual time, about a minute each on a core. Its outcome:
docs/results/quality.md.
"""

OPTIMIZERS = (
    {"outer.optimizer": "direct"},
    {"outer.optimizer": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9},  # DiLoCo's, at H=500
    {"outer.optimizer": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.3},  # effective step 1
    {"outer.optimizer": "nesterov", "outer.learning_rate": 0.5, "outer.momentum": 0.5},  # effective step 1
)
ALGORITHMS = ("decoupled", "streaming", "diloco")


def get_sweep() -> list[dict]:
    """One run of each optimizer under each algorithm, on the tiny preset."""
    run = {"driver": "virtual", "train.steps": 240, "eval.every": 0, "sample.tokens": 0}
    return [
        {"config": f"configs/dense.py:tiny,{algorithm},paper", **optimizer, **run}
        for algorithm in ALGORITHMS
        for optimizer in OPTIMIZERS
    ]
