"""H, the steps between two rounds of a fragment: decoupled and DiLoCo, 480 steps.

  python -m experiments.sweep --sweep=configs/sweeps/interval.py --output=runs/interval --jobs=2

33 runs of the micro model (configs/micro.py), those of data-parallel among them, which all are held against.
Bytes go down with H as the loss goes up.
"""

from configs import micro

BASELINE = {"algorithm": "data_parallel"}
INTERVALS = (6, 12, 24, 48, 96)


def get_sweep() -> list[dict]:
    """Both algorithms at each H, and data-parallel once a seed."""
    points = []
    for seed in micro.SEEDS:
        run = {"train.steps": 480, "seed": seed}
        reference = {"algorithm": "data_parallel", "sync.interval": 1, "config": "configs/micro.py:dense"}
        points.append({**reference, **run})
        for algorithm in ("decoupled", "diloco"):
            run["config"] = f"configs/micro.py:{algorithm}"
            points += [{"algorithm": algorithm, "sync.interval": h, **run} for h in INTERVALS]
    return points
