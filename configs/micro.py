"""The smallest models of each family that still show a difference: for sweeps of dozens of runs on two cores.

  python -m experiments.sweep --sweep=configs/sweeps/NAME.py --output=runs/NAME
  python -m experiments.train --config=configs/micro.py[:FAMILY][,ALGORITHM] [--config.any.field=value]
  python -m experiments.compare --config=configs/micro.py[:FAMILY] --output=runs/compare-micro-FAMILY

FAMILY
  dense       0.13M parameters, 2 layers 64 wide, on the Python standard library's sources (default)
  moe         0.2M, of which a token passes 0.13M: four experts, two a token
  vit         0.03M, on handwritten digits
  multimodal  0.13M, captions of one to three digits
ALGORITHM as in configs/dense.py

Four learners, in virtual time, 240 steps; scored once, at the end, on twice the rows of the tiny presets.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import baselines, dense, moe, multimodal, sections, vit

FAMILIES = {"dense": dense, "moe": moe, "vit": vit, "multimodal": multimodal}
SEEDS = (0, 1, 2)
OR_TINY = ("tiny", *FAMILIES)  # what `or_tiny` takes
CHOOSING = {**baselines.CHOOSING, "seed": 100}  # of runs that choose what those with SEEDS have
# Eight machines of which none is as fast as another, for what is about waiting: each 10% off, a step 5% more.
UNEVEN_EIGHT = {
    "sync.num_learners": (8,),
    "train.batch_size": (2,),  # rows
    "train.steps": (270,),
    "virtual.speed_variation": (0.1,),
    "virtual.step_variation": (0.05,),
}


def get_config(preset: str = "dense") -> ConfigDict:
    """The settings of `FAMILY`, `ALGORITHM` or `FAMILY,ALGORITHM`."""
    family, algorithm = sections.words(preset, tuple(FAMILIES), dense.ALGORITHMS)
    config = FAMILIES[family].get_config(f"tiny,{algorithm},paper")
    config.driver = "virtual"
    config.model.num_layers = 2
    if family == "vit":
        config.model.model_dim, config.model.num_heads, config.model.mlp_dim = 40, 4, 80
        config.train.batch_size = 8  # images
    else:
        config.model.model_dim, config.model.num_heads, config.model.num_kv_heads = 64, 4, 2
        config.model.head_dim, config.model.mlp_dim = 16, 176
        config.train.batch_size = 8 if family == "multimodal" else 4  # rows
        config.sample["images" if family == "multimodal" else "tokens"] = 0
    if family == "moe":
        config.model.num_experts, config.model.experts_per_token, config.model.expert_dim = 4, 2, 88
    # As in the tables of docs/results; what is best at 20 tokens a parameter is in configs/methods.py.
    config.inner.optimizer, config.inner.learning_rate = "adamw", 3e-3
    if family in ("dense", "moe"):
        config.data.interleave = 8
    config.train.steps = 240  # T
    config.inner.warmup_steps = 20
    config.eval.every = 0
    config.eval.num_batches *= 2
    return config


def or_tiny(family: str, algorithm: str = "decoupled") -> ConfigDict:
    """The settings of a family here, or with "tiny" those of the tiny dense model."""
    if family == "tiny":
        return dense.get_config(f"tiny,{algorithm},paper")
    return get_config(f"{family},{algorithm}")


def get_comparison(family: str = "dense") -> list[dict[str, Any]]:
    """Five algorithms side by side, in virtual time."""
    rows = baselines.comparison(get_config, family, tuple(FAMILIES))
    return [{**row, "eval.every": 24} for row in rows]


def get_tuning(family: str = "dense") -> dict[str, Any]:
    """Two algorithms tuned alike: `python -m experiments.tune`."""
    return baselines.tuning(get_config, family, tuple(FAMILIES))


def grid(*axes: Mapping[str, Sequence[Any]], config: str = "configs/micro.py:dense") -> list[dict[str, Any]]:
    """Every seed with every combination of the axes, the seeds one after another.

    Settings that stand in one axis go together: {"sync.num_learners": (2, 4), "train.batch_size": (8, 4)}
    is an axis of two values. The first axis changes slowest.
    """
    rows = [
        [dict(zip(axis, together, strict=True)) for together in zip(*axis.values(), strict=True)]
        for axis in axes
    ]
    combined = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*rows)]
    return [{"config": config, **point, "seed": seed} for seed in SEEDS for point in combined]
