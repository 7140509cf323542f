"""Four learners, and more that come while a cluster has capacity to spare: time to the same number of tokens.

  python -m experiments.train --config=configs/scavenging.py[:PRESET] [--config.any.field=value]
  python -m experiments.compare --config=configs/scavenging.py[:FAMILY] --output=runs/scavenging

PRESET, and after it ,FAMILY: of configs/micro.py, whose model it is then; without one the tiny dense model
  decoupled,N              N extra learners that arrive and leave; N=0, 1, 2, 4, 12 are +0, 25, 50, 100, 300%
  elastic_data_parallel,N  one job with the chips of 4 learners and those of N extra ones, while there are any

Extra learners meet the same spare capacity whatever their number (ddiloco/goodput/failures.py). A
decoupled learner that comes starts up and fetches the parameters while the others step; elastic
data-parallel stands still to take chips in or give them back. The tiny model takes about 2 minutes each on
2 CPU cores. Paper, time for +0/25/50/100/300%: decoupled 1.00/0.90/0.83/0.75/0.62, elastic
1.00/1.07/1.09/1.02/0.80. Outcome: docs/results/goodput.md.
"""

from ml_collections import ConfigDict

from configs import baselines, micro, sections
from ddiloco.config import ConfigError

ALGORITHMS = ("decoupled", "elastic_data_parallel")
PAPER = {
    "decoupled": {0: 1.00, 1: 0.90, 2: 0.83, 4: 0.75, 12: 0.62},
    "elastic_data_parallel": {0: 1.00, 1: 1.07, 2: 1.09, 4: 1.02, 12: 0.80},
}
BASE = 4  # learners that stay


def get_config(preset: str = "decoupled,4") -> ConfigDict:
    """The settings of `ALGORITHM,N` or `ALGORITHM,N,FAMILY`."""
    words = preset.split(",")
    numbers = [word for word in words if word.isdecimal()]
    names = ",".join(word for word in words if word not in numbers)
    if len(numbers) != 1 or not names:
        raise ConfigError(f"no preset {preset!r}; there are ALGORITHM,N with {', '.join(ALGORITHMS)}")
    algorithm, family = sections.words(names, ALGORITHMS, micro.OR_TINY)
    extra = int(numbers[0])
    config = micro.or_tiny(family)
    config.algorithm = algorithm
    config.driver = "virtual"
    config.train.steps = 480
    config.sync.num_learners = BASE
    config.train.tokens = baselines.budget(config)
    config.sync.num_learners = BASE + extra if algorithm == "decoupled" else BASE
    config.virtual.num_chips = 256 * config.sync.num_learners
    config.virtual.step_seconds = (5.0,)
    config.virtual.step_variation = 0.02
    config.virtual.availability = "spare_capacity"
    config.virtual.spare_capacity.extra_learners = extra
    config.virtual.spare_capacity.dwell_seconds = 120.0  # 24 steps
    config.virtual.recovery_seconds = 15.0  # of a learner that comes
    config.virtual.resize_seconds = 50.0  # of elastic data-parallel, whenever chips come or go
    return config


def get_comparison(family: str = "tiny") -> list[dict]:
    """Both algorithms with 0, 25, 50, 100 and 300% more."""
    return [
        {
            "label": f"{algorithm.replace('_', ' ')} +{100 * extra // BASE}%",
            "preset": f"{algorithm},{extra},{family}",
            "paper": {"time_ratio": PAPER[algorithm][extra]},
        }
        for algorithm in ALGORITHMS
        for extra in PAPER[algorithm]
    ]
