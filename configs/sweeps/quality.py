"""Does it learn? The tiny preset against one learner alone and against data-parallel, three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/quality.py[:PART] --output=runs/quality-PART --jobs=2

PART
  algorithms  the three at the preset's settings, and learners that meet every 6 steps; three seeds (default)
  rates       what these were chosen from: the split and the seed that choose

12 and 14 runs in virtual time, one to five minutes each on a core. The lone learner takes as many steps on
its own quarter of the data; data-parallel takes all learners' batches in one. Outcome:
docs/results/quality.md.
"""

from configs import baselines, micro, sections

ALGORITHMS = ("decoupled", "lone_learner", "data_parallel")
#         inner optimizer, inner rate, outer rate; None is data-parallel, which has none
TRIED = [("adamw", inner, outer) for inner in (0.003, 0.006, 0.012) for outer in (None, 0.5, 0.7)]
TRIED += [("muon", 0.006, 0.7), ("muon", 0.012, 0.7), ("muon", 0.012, 0.5), ("muon", 0.024, 0.5)]
FORMER = {"inner.optimizer": "adamw", "inner.learning_rate": 0.003, "data.interleave": 8}


def get_sweep(part: str = "algorithms") -> list[dict]:
    """The points of `PART`."""
    (part,) = sections.words(part, ("algorithms", "rates"))
    if part == "algorithms":
        points = [*map(_point, ALGORITHMS), _point("decoupled", **{"sync.interval": 6})]
        return [{**point, "seed": seed} for seed in micro.SEEDS for point in points]
    points = [_point("decoupled", **FORMER), *(_tried(*point) for point in TRIED)]
    return [{**point, **micro.CHOOSING} for point in points]


def _tried(optimizer: str, inner: float, outer: float | None) -> dict:
    rates = {"inner.optimizer": optimizer, "inner.learning_rate": inner}
    if outer is None:
        return _point("data_parallel", **rates)
    return _point("decoupled", **rates, **{"outer.learning_rate": outer})


def _point(algorithm: str, **settings) -> dict:
    run = {"driver": "virtual", "virtual.step_variation": baselines.STEP_VARIATION, "eval.every": 0}
    return {"config": f"configs/dense.py:tiny,{algorithm}", **run, "sample.tokens": 0, **settings}
