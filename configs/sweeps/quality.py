"""Does it learn? The tiny preset against one learner alone and against data-parallel, three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/quality.py --output=runs/quality

9 runs, about 15 minutes on 2 CPU cores. The lone learner takes as many steps on its own quarter of the data;
data-parallel takes all learners' batches in one. Its outcome: docs/results/quality.md.
"""


def get_sweep() -> list[dict]:
    """Each algorithm with each seed."""
    return [
        {"config": f"configs/dense.py:tiny,{algorithm}", "seed": seed}
        for seed in (0, 1, 2)
        for algorithm in ("decoupled", "lone_learner", "data_parallel")
    ]
