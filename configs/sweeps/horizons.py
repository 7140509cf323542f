"""The gap to data-parallel at equal tokens, by horizon: does it fall as training goes on?

  python -m experiments.sweep --sweep=configs/sweeps/horizons.py[:FAMILY] --output=runs/horizons-FAMILY

FAMILY is dense (default), moe, vit or multimodal. The smallest models (configs/micro.py), three seeds, one
schedule of the learning rate for each horizon. All learners are alike and steady, so that the same steps are
the same tokens. Each run of data-parallel is what the decoupled run of its seed and horizon is held against.
"""

from configs import micro, sections

BASELINE = {"algorithm": "data_parallel"}
HORIZONS = {  # T, steps
    "dense": (120, 240, 480, 960, 1920),
    "moe": (240, 480, 960),
    "vit": (240, 480, 960, 1920),
    "multimodal": (240, 480, 960, 1920),
}
ALGORITHMS = ("data_parallel", "decoupled")


def get_sweep(family: str = "dense") -> list[dict]:
    """Both algorithms at each horizon, with each seed."""
    (family,) = sections.words(family, tuple(HORIZONS))
    return [
        {"algorithm": algorithm, "train.steps": steps, "config": f"configs/micro.py:{family}", "seed": seed}
        for seed in micro.SEEDS
        for steps in HORIZONS[family]
        for algorithm in ALGORITHMS
    ]
