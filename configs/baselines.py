"""Five algorithms at equal tokens and global batch: the rows of `get_comparison()` of every model family.

  python -m experiments.compare --config=configs/dense.py[:SIZE] [--seeds=0,1,2] [--jobs=2]

and so with configs/moe.py, vit.py and multimodal.py. All train in virtual time on the same data order and as
many tokens; a step of data-parallel takes the batches of all learners at once.

The virtual seconds are the defaults of `config.virtual`: a second a step for every learner, 2% more or less
from step to step, links that take no time, nobody fails. So they show who waits for whom, not what slow links
cost: for that, add --config.virtual.latency and --config.virtual.bandwidth, over which data-parallel
exchanges gradients in every step. Elastic data-parallel differs from data-parallel once chips fail:
--config.virtual.lives=failures --config.virtual.num_chips=1200000.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

ALGORITHMS = {
    "data-parallel": "data_parallel",
    "elastic data-parallel": "elastic_data_parallel",
    "DiLoCo": "diloco",
    "Streaming DiLoCo": "streaming",
    "Decoupled DiLoCo": "decoupled",
}
STEP_VARIATION = 0.02  # standard deviation of a step's time, as a share of it


def comparison(
    get_config: Callable[[str], ConfigDict], size: str, sizes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """A row for each of ALGORITHMS.

    Args:
      get_config: the family's, of `SIZE,ALGORITHM`.
      size: one of `sizes`.
      sizes: those that the family has.
    """
    if size not in sizes:
        raise ValueError(f"no size {size!r}; there are {', '.join(sizes)}")
    tokens = budget(get_config(f"{size},data_parallel"))
    return [
        {
            "label": label,
            # The elastic job is the same job; only virtual time has it.
            "preset": f"{size},{algorithm.removeprefix('elastic_')}",
            "algorithm": algorithm,
            "driver": "virtual",
            "virtual.step_variation": STEP_VARIATION,
            "train.tokens": tokens,
        }
        for label, algorithm in ALGORITHMS.items()
    ]


def budget(config: ConfigDict) -> int:
    """The tokens that a config's steps come to: of all learners, with every batch full."""
    # Only who compares waits for JAX to be imported.
    from ddiloco.settings.experiment import parse, task_of

    experiment = parse(config)
    rows = sum(experiment.batch_size(m) for m in range(experiment.sync.num_learners))
    return experiment.train.steps * rows * task_of(experiment).row_tokens


INNER = {"AdamW": "adamw", "Muon": "muon"}


def tuning(get_config: Callable[[str], ConfigDict], size: str, sizes: tuple[str, ...]) -> dict[str, Any]:
    """Data-parallel and Decoupled DiLoCo with either inner optimizer, for `experiments.tune`.

    What chooses sees the first nine tenths of the training split, and is scored on the last. Arguments as for
    `comparison`.
    """
    entries = {entry["label"]: entry for entry in comparison(get_config, size, sizes)}
    batch = get_config(size).train.batch_size
    rows = []
    for name, optimizer in INNER.items():
        for label in ("data-parallel", "Decoupled DiLoCo"):
            row = {
                **entries[label],
                "label": f"{label}, {name}",
                "inner.optimizer": optimizer,
                "inner.learning_rate": 0.006,
                "train.batch_size": batch,
                "inner.final_fraction": 0.1,
                "axes": ["inner.learning_rate", "train.batch_size", "inner.final_fraction"],
            }
            if label != "data-parallel":
                row |= {
                    "outer.learning_rate": 0.7,
                    "outer.momentum": 0.3,
                    "against": f"data-parallel, {name}",
                }
                row["axes"] += ["outer.learning_rate", "outer.momentum"]
            rows.append(row)
    return {
        "rows": rows,
        "grid": {
            "inner.learning_rate": (0.00075, 0.0015, 0.003, 0.006, 0.012, 0.024, 0.048),
            "train.batch_size": tuple(n for n in (batch // 8, batch // 4, batch // 2, batch, 2 * batch) if n),
            "inner.final_fraction": (0.0, 0.03, 0.1, 0.3),
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8, 0.9),
        },
        "together": ["inner.learning_rate", "train.batch_size"],  # a larger batch wants a larger rate
        "budget": 24,
        "choosing": {"data.train_split": "train[:90%]", "data.eval_split": "train[90%:]", "eval.every": 0},
    }
