"""Eight learners on two hardware generations: what waiting for all of them costs, and what not waiting costs.

  python -m experiments.train --config=configs/heterogeneous.py[:PRESET][,FAMILY] [--config.any.field=value]
  python -m experiments.compare --config=configs/heterogeneous.py[:FAMILY] --output=runs/heterogeneous

PRESET
  grace  K=1, and learners that come within the slack are let in (default)
  all    K=8: every round waits for all learners, and learners for the rounds
  first  K=1 and no grace window: each is asked ahead, and late offers miss the round
FAMILY   of configs/micro.py, whose model it is then; without one the tiny dense model

Four learners take a second for a step, four 18% longer; learners of a kind differ by a further 10%,
drawn from the seed. The global batch is that of the family's other presets. All have the same
600 virtual seconds, about 3 minutes on 2 CPU cores; for the same number of tokens instead, add
--config.virtual.seconds=None --config.train.tokens=1966080. Paper: goodput 100% / 84% / 100%, text quality
55.3 / 54.4 / 51.4. Outcome: docs/results/goodput.md.
"""

from ml_collections import ConfigDict, config_dict

from configs import micro, sections

PRESETS = ("grace", "all", "first")
PAPER = {"grace": {"goodput": 1.0}, "all": {"goodput": 0.84}, "first": {"goodput": 1.0}}


def get_config(preset: str = "grace") -> ConfigDict:
    """The settings of one of PRESETS, and a family."""
    preset, family = sections.words(preset, PRESETS, micro.OR_TINY)
    config = micro.or_tiny(family, "streaming" if preset == "all" else "decoupled")
    config.driver = "virtual"
    config.train.batch_size //= 2  # of eight learners: as many rows in all as of four
    config.sync.num_learners = 8
    config.sync.quorum = config_dict.placeholder(int) if preset == "all" else 1  # None: all
    if preset == "first":
        config.sync.gamma = 0.0  # no grace window
    config.outer.optimizer = "nesterov"  # the same for all three
    config.virtual.seconds = 600.0
    config.virtual.step_seconds = (1.0,) * 4 + (1.18,) * 4
    config.virtual.speed_variation = 0.1
    config.virtual.step_variation = 0.02
    return config


def get_comparison(family: str = "tiny") -> list[dict]:
    """The three, side by side."""
    labels = {"grace": "K=1 with grace", "all": "K=8", "first": "K=1, no grace"}
    return [{"label": labels[name], "preset": f"{name},{family}", "paper": PAPER[name]} for name in PRESETS]
