"""What the gap to data-parallel is made of: learners, interval and batch, one at a time.

  python -m experiments.compare --config=configs/gap.py --output=runs/gap --seeds=0,1,2
  python -m experiments.agreement --runs=runs/gap

The micro dense model (configs/micro.py) at 2.4 tokens a parameter, Muon inside, with the rates and the weight
decay of configs/methods.py:short. All read 512 documents side by side and, but for the last, have 8 rows a
step of all learners together. One to three minutes a run on a core. Outcome: docs/results/methods.md.
"""

from typing import Any

from configs import baselines, methods

AT = {"inner.learning_rate": 0.024, "inner.weight_decay": 0.4, **baselines.SCORED_AT_THE_END}
#        learners, interval, rows of each
ROWS = ((1, 24, 8), (4, 2, 2), (4, 6, 2), (4, 24, 2), (8, 24, 1), (4, 24, 8))

get_config = methods.get_config


def get_comparison() -> list[dict[str, Any]]:
    """Decoupled, held against data-parallel with as many rows a step of all learners together."""
    found = [_row(_baseline(4 * rows), "data_parallel", {"train.batch_size": rows}) for rows in (2, 8)]
    for learners, interval, rows in ROWS:
        together = learners * rows
        label = f"M={learners}, H={interval}" + (f", {together} rows" if together != 8 else "")
        has = {"sync.num_learners": learners, "sync.interval": interval, "train.batch_size": rows}
        has |= {"data.interleave": methods.DOCUMENTS // learners, **methods.NESTEROV}
        found.append({**_row(label, "decoupled", has), "against": _baseline(together)})
    return found


def _baseline(rows: int) -> str:
    return f"data-parallel, {rows} rows"


def _row(label: str, preset: str, has: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "preset": preset, **methods.SHORT, **AT, **has}
