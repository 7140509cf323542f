"""The gap at 20 tokens a parameter with Muon inside: the micro model, with rates found for this length.

  python -m experiments.sweep --sweep=configs/sweeps/muon.py[:PART] --output=runs/muon-PART --jobs=2

PART
  gap    data-parallel, and learners that meet every 24, 6 and 2 steps; three seeds (default)
  rates  what these were chosen from: another seed, on the first nine tenths of the split, scored on the last

Two to ten minutes a run on a core. The inner rate goes down to 0, and 128 documents are read side by side.
"""

from configs import methods, micro, sections

BASELINE = {"algorithm": "data_parallel"}
#         rows, inner rate: of data-parallel, whose step has all learners' rows
DATA_PARALLEL = ((2, 0.006), (2, 0.012), (2, 0.024), (2, 0.048), (1, 0.024), (4, 0.024))
#         H, inner rate, outer rate, and outer momentum where it is not 0.3
DECOUPLED = ((24, 0.006, 0.7), (24, 0.006, 1.0), (24, 0.012, 0.5), (24, 0.012, 0.7), (24, 0.024, 0.5))
DECOUPLED += ((24, 0.048, 0.5), (6, 0.024, 0.5), (6, 0.012, 0.7), (2, 0.024, 0.5), (2, 0.024, 0.7))
DECOUPLED += ((2, 0.024, 1.0, 0.0), (1, 0.024, 0.5))


def get_sweep(part: str = "gap") -> list[dict]:
    """The points of `PART`."""
    (part,) = sections.words(part, ("gap", "rates"))
    if part == "rates":
        tried = [_data_parallel(*point) for point in DATA_PARALLEL]
        tried += [_decoupled(*point) for point in DECOUPLED]
        return [{**point, **micro.CHOOSING} for point in tried]
    found = (_data_parallel(2, 0.024), *(_decoupled(interval, 0.024, 0.5) for interval in (24, 6, 2)))
    return [{**point, "seed": seed} for seed in micro.SEEDS for point in found]


def _data_parallel(rows: int, rate: float) -> dict:
    return _point("data_parallel", rows, rate)


def _decoupled(interval: int, rate: float, outer: float, momentum: float = 0.3) -> dict:
    found = {"sync.interval": interval, "outer.learning_rate": outer, "outer.momentum": momentum}
    return {**_point("decoupled", 2, rate), **found}


def _point(algorithm: str, rows: int, rate: float) -> dict:
    return {
        **methods.SETTINGS,
        "algorithm": algorithm,
        "config": f"configs/micro.py:{algorithm}",
        "train.batch_size": rows,
        "inner.learning_rate": rate,
    }
