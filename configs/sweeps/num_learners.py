"""The number of learners at an equal global batch of 32 rows and equal tokens, against data-parallel.

  python -m experiments.sweep --sweep=configs/sweeps/num_learners.py --output=runs/num_learners --jobs=2

18 runs of the micro model (configs/micro.py), which read 128 documents side by side in all, whatever M is.
The scaling study of DiLoCo (arXiv 2503.09799) tells a gap of about 0, 1, 2 and 4% for M = 1, 2, 4 and 8, at
35M parameters.
"""

from configs import micro

BASELINE = {"algorithm": "data_parallel"}
LEARNERS = {
    "sync.num_learners": (1, 2, 4, 8, 16),
    "train.batch_size": (32, 16, 8, 4, 2),
    "data.interleave": (128, 64, 32, 16, 8),  # of each shard
}


def get_sweep() -> list[dict]:
    """Decoupled with each number of learners, and data-parallel once a seed."""
    reference = {name: values[:1] for name, values in LEARNERS.items()}
    return [
        *micro.grid({"algorithm": ("data_parallel",)}, reference),
        *micro.grid({"algorithm": ("decoupled",)}, LEARNERS),
    ]
