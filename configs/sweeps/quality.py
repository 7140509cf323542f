"""Does it learn? The tiny preset against one learner alone and against data-parallel, three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/quality.py[:PART] --output=runs/quality-PART --jobs=2

PART
  algorithms  the three at the preset's settings, three seeds (default)
  rates       what these were chosen from: the split and the seed that choose

9 and 10 runs in virtual time, two to five minutes each on a core. The lone learner takes as many steps on its
own quarter of the data; data-parallel takes all learners' batches in one. Outcome: docs/results/quality.md.
"""

from configs import baselines, micro, sections

ALGORITHMS = ("decoupled", "lone_learner", "data_parallel")
INNER, OUTER = (0.003, 0.006, 0.012), (0.5, 0.7)  # learning rates
FORMER = {"inner.learning_rate": 0.003, "outer.learning_rate": 0.7, "data.interleave": 8}


def get_sweep(part: str = "algorithms") -> list[dict]:
    """The points of `PART`."""
    (part,) = sections.words(part, ("algorithms", "rates"))
    if part == "algorithms":
        return [_point(algorithm, seed=seed) for seed in micro.SEEDS for algorithm in ALGORITHMS]
    tried = [_point("data_parallel", **{"inner.learning_rate": rate}) for rate in INNER]
    for rate in INNER:
        rates = [{"inner.learning_rate": rate, "outer.learning_rate": outer} for outer in OUTER]
        tried += [_point("decoupled", **at) for at in rates]
    return [{**point, **micro.CHOOSING} for point in [_point("decoupled", **FORMER), *tried]]


def _point(algorithm: str, **settings) -> dict:
    run = {"driver": "virtual", "virtual.step_variation": baselines.STEP_VARIATION, "eval.every": 0}
    return {"config": f"configs/dense.py:tiny,{algorithm}", **run, "sample.tokens": 0, **settings}
