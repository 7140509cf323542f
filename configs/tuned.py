"""The tiny dense model with each algorithm at its best: the points that docs/results/tuning.md found.

  python -m experiments.train --config=configs/tuned.py[:ALGORITHM][,INNER] [--config.any.field=value]
  python -m experiments.compare --config=configs/tuned.py[:INNER] --output=runs/tuned

ALGORITHM
  decoupled (default), data_parallel
INNER
  muon (default), adamw

All train on the tokens of configs/dense.py:tiny, and are best for that length alone. Learners meet every
24 steps as there; --config.sync.interval=6 is four times the bytes and leaves two thirds of the gap.
"""

from ml_collections import ConfigDict

from configs import baselines, dense

ROWS = {  # a learner's, of each step
    ("data_parallel", "adamw"): 1,
    ("data_parallel", "muon"): 2,
    ("decoupled", "adamw"): 2,
    ("decoupled", "muon"): 4,
}
INNER_RATE = {
    ("data_parallel", "adamw"): 0.003,
    ("data_parallel", "muon"): 0.006,
    ("decoupled", "adamw"): 0.006,
    ("decoupled", "muon"): 0.012,
}
ALGORITHMS, INNER = ("decoupled", "data_parallel"), ("muon", "adamw")
OFTEN = 6  # steps


def get_config(preset: str = "decoupled,muon") -> ConfigDict:
    """The settings of `ALGORITHM`, `INNER` or `ALGORITHM,INNER`."""
    names = preset.split(",")
    unknown = [name for name in names if name not in ALGORITHMS + INNER]
    if unknown:
        raise ValueError(f"no preset {unknown[0]!r}; there are {', '.join(ALGORITHMS + INNER)}")
    algorithm = next((name for name in names if name in ALGORITHMS), ALGORITHMS[0])
    inner = next((name for name in names if name in INNER), INNER[0])
    config = dense.get_config(f"tiny,{algorithm}")
    config.train.steps *= config.train.batch_size // ROWS[algorithm, inner]  # as many tokens
    config.train.batch_size = ROWS[algorithm, inner]
    config.inner.optimizer = inner
    config.inner.learning_rate = INNER_RATE[algorithm, inner]
    if algorithm == "decoupled":
        config.outer.learning_rate, config.outer.momentum = 0.5, 0.3
    return config


def get_comparison(inner: str = "muon") -> list[dict]:
    """Data-parallel, and Decoupled DiLoCo whose learners meet every 24 steps, and every 6."""
    if inner not in INNER:
        raise ValueError(f"no inner optimizer {inner!r}; there are {', '.join(INNER)}")
    run = {
        "driver": "virtual",
        "virtual.step_variation": baselines.STEP_VARIATION,
        "train.tokens": baselines.budget(dense.get_config("tiny")),
    }
    interval = get_config(f"decoupled,{inner}").sync.interval
    return [
        {"label": "data-parallel", "preset": f"data_parallel,{inner}", **run},
        *(
            {"label": f"decoupled, H={h}", "preset": f"decoupled,{inner}", "sync.interval": h, **run}
            for h in (interval, OFTEN)
        ),
    ]
