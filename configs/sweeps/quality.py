"""Does it learn? A tiny preset against one learner alone and against data-parallel, three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/quality.py[:FAMILY][,PART] --output=runs/quality --jobs=2

FAMILY
  dense, moe or vit, of configs/FAMILY.py (dense is the default)
PART
  algorithms  the three at the preset's settings, and learners that meet every 6 steps; three seeds (default)
  rates       what these were chosen from: the split and the seed that choose

Six to seventeen runs in virtual time, one to eight minutes each on a core. The lone learner takes as many
steps on its own quarter of the data; data-parallel takes all learners' batches in one. Outcome:
docs/results/quality.md.
"""

from configs import baselines, micro, sections

ALGORITHMS = ("decoupled", "lone_learner", "data_parallel")
FORMER = {"inner.optimizer": "adamw", "inner.learning_rate": 0.003, "data.interleave": 8}  # of dense
TRIED = {  # inner optimizer, inner rate, outer rates; None is data-parallel, which has none
    "dense": [
        *(("adamw", inner, (None, 0.5, 0.7)) for inner in (0.003, 0.006, 0.012)),
        ("muon", 0.006, (None, 0.7)),
        ("muon", 0.012, (None, 0.7, 0.5)),
        ("muon", 0.024, (None, 0.5)),
    ],
    "moe": [(*at, (None, 0.7)) for at in (("adamw", 0.003), ("adamw", 0.006), ("muon", 0.012))],
    "vit": [
        *(("adamw", inner, (None, 0.7)) for inner in (0.0015, 0.003, 0.006)),
        *(("muon", inner, (None, 0.7)) for inner in (0.0015, 0.003, 0.006, 0.012)),
    ],
}


def get_sweep(argument: str = "dense") -> list[dict]:
    """The points of `FAMILY,PART`."""
    family, part = sections.words(argument, tuple(TRIED), ("algorithms", "rates"))
    if part == "algorithms":
        points = [_point(family, name) for name in ALGORITHMS]
        points.append(_point(family, "decoupled", **{"sync.interval": 6}))
        return [{**point, "seed": seed} for seed in micro.SEEDS for point in points]
    points = [_point("dense", "decoupled", **FORMER)] if family == "dense" else []
    points += [_tried(family, name, inner, outer) for name, inner, rates in TRIED[family] for outer in rates]
    return [{**point, **micro.CHOOSING} for point in points]


def _tried(family: str, optimizer: str, inner: float, outer: float | None) -> dict:
    rates = {"inner.optimizer": optimizer, "inner.learning_rate": inner}
    if outer is None:
        return _point(family, "data_parallel", **rates)
    return _point(family, "decoupled", **rates, **{"outer.learning_rate": outer})


def _point(family: str, algorithm: str, **settings) -> dict:
    sample = {} if family == "vit" else {"sample.tokens": 0}
    return {
        "config": f"configs/{family}.py:tiny,{algorithm},paper",
        **baselines.SCORED_AT_THE_END,
        **sample,
        **settings,
    }
