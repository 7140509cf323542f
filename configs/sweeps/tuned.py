"""The tuned points of docs/results/tuning.md with one thing changed, which none of them was tuned for.

  python -m experiments.sweep --sweep=configs/sweeps/tuned.py[:WHAT] --output=runs/tuned-WHAT --jobs=2

WHAT
  interval    learners meet every 6 steps, not every 24 (default)
  interleave  a shard reads 128 documents side by side, not 8
  both        the two together
  length      with Muon, on 20 tokens a parameter, not on 2.4; 30 to 40 minutes a run

Runs of the tiny preset's tokens in virtual time, four to five minutes each on a core, with three seeds.
"""

DECOUPLED = {"outer.learning_rate": 0.5, "outer.momentum": 0.3}
ADAMW = {
    "data_parallel": {"train.batch_size": 1, "inner.learning_rate": 0.003},
    "decoupled": {"train.batch_size": 2, "inner.learning_rate": 0.006, **DECOUPLED},
}
MUON = {
    "data_parallel": {"inner.optimizer": "muon", "train.batch_size": 2, "inner.learning_rate": 0.006},
    "decoupled": {
        "inner.optimizer": "muon",
        "train.batch_size": 4,
        "inner.learning_rate": 0.012,
        **DECOUPLED,
    },
}
MEETING, READING = {"sync.interval": 6}, {"data.interleave": 128}
LENGTH = {"train.tokens": 16_121_856, "eval.every": 480}
POINTS = {
    "interval": [
        {"algorithm": "decoupled", **ADAMW["decoupled"], **MEETING},
        {"algorithm": "decoupled", **MUON["decoupled"], **MEETING},
    ],
    "interleave": [{"algorithm": name, **settings, **READING} for name, settings in ADAMW.items()],
    "both": [{"algorithm": "decoupled", **ADAMW["decoupled"], **MEETING, **READING}],
    "length": [{"algorithm": name, **settings, **LENGTH} for name, settings in MUON.items()],
}
SEEDS = (0, 1, 2)


def get_sweep(what: str = "interval") -> list[dict]:
    """Each point with each seed, at equal tokens."""
    if what not in POINTS:
        raise ValueError(f"no sweep {what!r}; there are {', '.join(POINTS)}")
    run = {"driver": "virtual", "virtual.step_variation": 0.02, "train.tokens": 1_966_080}
    return [
        {**run, **point, "config": f"configs/dense.py:tiny,{point['algorithm']}", "seed": seed}
        for seed in SEEDS
        for point in POINTS[what]
    ]
