"""The number of learners at an equal global batch of 32 rows and equal tokens, against data-parallel.

  python -m experiments.sweep --sweep=configs/sweeps/num_learners.py[:FAMILY] --output=DIR --jobs=2

18 runs of the micro model of FAMILY (configs/micro.py; dense without one). Learners that read text read 128
documents side by side in all, whatever M is. The scaling study of DiLoCo (arXiv 2503.09799) tells a gap of
about 0, 1, 2 and 4% for M = 1, 2, 4 and 8, at 35M parameters.
"""

from configs import micro, sections

BASELINE = {"algorithm": "data_parallel"}
LEARNERS = {
    "sync.num_learners": (1, 2, 4, 8, 16),
    "train.batch_size": (32, 16, 8, 4, 2),
    "data.interleave": (128, 64, 32, 16, 8),  # of each shard
}


def get_sweep(family: str = "dense") -> list[dict]:
    """Decoupled with each number of learners, and data-parallel once a seed."""
    (family,) = sections.words(family, tuple(micro.FAMILIES))
    text = family in ("dense", "moe")
    learners = {name: values for name, values in LEARNERS.items() if text or name != "data.interleave"}
    reference = {name: values[:1] for name, values in learners.items()}
    config = f"configs/micro.py:{family}"
    return [
        *micro.grid({"algorithm": ("data_parallel",)}, reference, config=config),
        *micro.grid({"algorithm": ("decoupled",)}, learners, config=config),
    ]
