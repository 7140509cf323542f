"""12 billion parameters in four regions, over links of a few Gbit/s: time to the same number of tokens.

  python -m experiments.compare --config=configs/cross_region.py[:GBIT[,SECONDS]] --output=runs/cross_region

GBIT is what the link of a region carries each way, SECONDS what a step in one region takes (default 5 and 5).
Nothing is trained: the protocol's messages and data-parallel's exchange take the time of their bytes. Paper:
12B parameters, four regions, 2 to 5 Gbit/s, more than 20 times faster than data-parallel training; what a
step takes is not published. Outcome: docs/results/codecs.md.
"""

from ml_collections import ConfigDict

from configs import dense
from ddiloco.config import ConfigError

LATENCY = 0.03  # seconds one way, between regions of one continent
ROWS = {  # label: algorithm, codec of offers and of updates
    "data-parallel": ("data_parallel", "f32"),
    "decoupled, f32": ("decoupled", "f32"),
    "decoupled, int8": ("decoupled", "int8"),
    "decoupled, int4": ("decoupled", "int4"),
}


def get_config(preset: str = "decoupled,int4,5,5") -> ConfigDict:
    """The settings of `ALGORITHM,CODEC,GBIT,SECONDS`."""
    try:
        algorithm, codec, *link = preset.split(",")
        gbit, seconds = map(float, link)
    except ValueError:
        raise ConfigError("must be ALGORITHM,CODEC,GBIT,SECONDS") from None
    config = dense.get_config(f"9b,{algorithm},paper")
    config.model.update(num_layers=48, model_dim=3840, mlp_dim=15_360)
    config.driver = "virtual"
    config.sync.num_learners = 4
    config.train.steps = 20 * config.sync.interval
    config.outer.codec = config.outer.update_codec = codec
    config.virtual.arrays = False
    config.virtual.num_chips = 4096
    config.virtual.step_seconds = (seconds,)
    config.virtual.step_variation = 0.02
    config.virtual.bandwidth = (gbit * 1e9 / 8,)
    config.virtual.latency = (LATENCY,)
    return config


def get_comparison(links: str = "5,5") -> list[dict]:
    """Data-parallel, and decoupled with each codec; all at `GBIT` or `GBIT,SECONDS`."""
    gbit, _, seconds = links.partition(",")
    return [
        {"label": label, "preset": f"{algorithm},{codec},{gbit},{seconds or 5}"}
        for label, (algorithm, codec) in ROWS.items()
    ]
