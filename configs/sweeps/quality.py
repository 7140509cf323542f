"""Does it learn? The tiny preset against one learner alone and against data-parallel, three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/quality.py --output=runs/quality

9 runs in virtual time, about two minutes each on a core. The lone learner takes as many steps on its own
quarter of the data; data-parallel takes all learners' batches in one. Its outcome: docs/results/quality.md.
"""


def get_sweep() -> list[dict]:
    """Each algorithm with each seed."""
    run = {"driver": "virtual", "eval.every": 0, "sample.tokens": 0}
    return [
        {"config": f"configs/dense.py:tiny,{algorithm}", "seed": seed, **run}
        for seed in (0, 1, 2)
        for algorithm in ("decoupled", "lone_learner", "data_parallel")
    ]
