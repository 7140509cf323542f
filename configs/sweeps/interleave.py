"""The order of the data: 128 documents of a shard read side by side, with settings that were tuned at 8.

  python -m experiments.sweep --sweep=configs/sweeps/interleave.py --output=runs/interleave --jobs=2

Six runs of the tiny preset's tokens in virtual time, four minutes each on a core. Its outcome:
docs/results/tuning.md.
"""

AT_ITS_BEST = {  # with AdamW inside, as experiments.tune chose
    "data_parallel": {"train.batch_size": 1, "inner.learning_rate": 0.003},
    "decoupled": {
        "train.batch_size": 2,
        "inner.learning_rate": 0.006,
        "outer.learning_rate": 0.5,
        "outer.momentum": 0.3,
    },
}
DOCUMENTS = 128
SEEDS = (0, 1, 2)


def get_sweep() -> list[dict]:
    """Both algorithms with each seed, at equal tokens."""
    run = {"driver": "virtual", "virtual.step_variation": 0.02, "train.tokens": 1_966_080}
    return [
        {
            "config": f"configs/dense.py:tiny,{algorithm}",
            **settings,
            "data.interleave": DOCUMENTS,
            **run,
            "seed": seed,
        }
        for seed in SEEDS
        for algorithm, settings in AT_ITS_BEST.items()
    ]
