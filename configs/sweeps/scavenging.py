"""What learners that come and go do to quality at 20 tokens a parameter, where steps are not what is missing.

  python -m experiments.sweep --sweep=configs/sweeps/scavenging.py --output=runs/scavenging-quality --jobs=2

The model of configs/methods.py with Muon, as many tokens for all, three seeds; four learners that stay, and
0, 4 or 12 more that come while there is room (configs/scavenging.py), and read as many documents side by
side when all are there. About 2 minutes a run on a core.
"""

from configs import methods, micro

EXTRA = "virtual.spare_capacity.extra_learners"
BASELINE = {EXTRA: 0}
RATES = {"inner.learning_rate": 0.024, **methods.NESTEROV}  # the best of docs/results/methods.md


def get_sweep() -> list[dict]:
    """Each number of extra learners with each seed."""
    return [
        {
            **methods.SETTINGS,
            **RATES,
            "data.interleave": methods.DOCUMENTS // (4 + extra),  # of each shard
            EXTRA: extra,  # before the config, which follows from it
            "config": f"configs/scavenging.py:decoupled,{extra},dense",
            "seed": seed,
        }
        for seed in micro.SEEDS
        for extra in (0, 4, 12)
    ]
