"""Training while 1.2 million chips fail: decoupled learners and data-parallel under the same interruptions.

  python -m experiments.train --config=configs/chaos.py[:PRESET][,FAMILY] [--config.any.field=value]
  python -m experiments.compare --config=configs/chaos.py[:FAMILY] --output=runs/chaos --seeds=0,1,2

PRESET
  decoupled               M=8 learners of 150,000 chips each, K=1 (default)
  elastic_data_parallel   one job of all chips that goes on with what is left
  data_parallel           one job of all chips that starts again with spares
  undisturbed             decoupled, without failures
  data_parallel_undisturbed
FAMILY                    of configs/micro.py, whose model it is then; without one the tiny dense model

One seed draws one list of interruptions, which all three meet: a chip fails once a year, so some chip
every 26 s. The small model stands for a large one whose step takes 5 s: there are as many
interruptions in a round of 24 steps (120 s) as there would be at full scale, though not as many rounds.
All of a family train on the same number of tokens. The tiny model takes about 4 minutes each on 2 CPU
cores. Paper: goodput 88% / 58% / 27%. Outcome: docs/results/chaos.md.
"""

from ml_collections import ConfigDict

from configs import baselines, micro, sections

PRESETS = (
    "decoupled",
    "elastic_data_parallel",
    "data_parallel",
    "undisturbed",
    "data_parallel_undisturbed",
)
STEP_SECONDS = 5.0


def get_config(preset: str = "decoupled") -> ConfigDict:
    """The settings of one of PRESETS, and a family."""
    preset, family = sections.words(preset, PRESETS, micro.OR_TINY)
    config = micro.or_tiny(family)
    config.algorithm = preset.removesuffix("_undisturbed").replace("undisturbed", "decoupled")
    config.driver = "virtual"
    config.train.batch_size //= 2  # of eight learners: as many rows in all as of four
    config.train.steps = 480
    config.sync.num_learners = 8
    config.train.tokens = baselines.budget(config)
    config.virtual.num_chips = 1_200_000
    config.virtual.step_seconds = (STEP_SECONDS,)  # on all chips; longer when slices are away
    config.virtual.step_variation = 0.02
    config.virtual.availability = "steady" if preset.endswith("undisturbed") else "failures"
    return config


def get_comparison(family: str = "tiny") -> list[dict]:
    """The three under failures, and the two without."""
    rows = [
        {"label": "decoupled, M=8", "preset": "decoupled", "paper": {"goodput": 0.88}},
        {"label": "elastic data-parallel", "preset": "elastic_data_parallel", "paper": {"goodput": 0.58}},
        {"label": "data-parallel", "preset": "data_parallel", "paper": {"goodput": 0.27}},
        {"label": "decoupled, no failures", "preset": "undisturbed"},
        {"label": "data-parallel, no failures", "preset": "data_parallel_undisturbed"},
    ]
    return [{**row, "preset": f"{row['preset']},{family}"} for row in rows]
