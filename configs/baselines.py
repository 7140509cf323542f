"""Five algorithms at equal tokens and global batch: the rows of `get_comparison()` of every model family.

  python -m experiments.compare --config=configs/dense.py[:SIZE] [--seeds=0,1,2] [--jobs=2]

and so with configs/moe.py, vit.py and multimodal.py. All train in virtual time on the same data order and as
many tokens; a step of data-parallel takes the batches of all learners at once.

The virtual seconds are the defaults of `config.virtual`, a second a step for every learner, but 2% more or
less from step to step (`STEP_VARIATION`); links take no time, no learner fails. So they show waits, not what
slow links cost: for that, add --config.virtual.latency and --config.virtual.bandwidth, over which
data-parallel exchanges gradients in every step. Elastic data-parallel differs from data-parallel once chips
fail: --config.virtual.availability=failures --config.virtual.num_chips=1200000
--config.virtual.failures.step_seconds=1.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import sections

ALGORITHMS = {
    "data-parallel": "data_parallel",
    "elastic data-parallel": "elastic_data_parallel",
    "DiLoCo": "diloco",
    "Streaming DiLoCo": "streaming",
    "Decoupled DiLoCo": "decoupled",
}
# What chooses sees nine tenths of the training split, and is scored on the last.
CHOOSING = {"data.train_split": "train[:90%]", "data.eval_split": "train[90%:]"}
STEP_VARIATION = 0.02  # standard deviation of a step's time, as a share of it
SCORED_AT_THE_END = {"driver": "virtual", "virtual.step_variation": STEP_VARIATION, "eval.every": 0}


def comparison(
    get_config: Callable[[str], ConfigDict], size: str, sizes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """A row for each of ALGORITHMS.

    Args:
      get_config: the family's, of `SIZE,ALGORITHM`.
      size: one of `sizes`.
      sizes: those that the family has.
    """
    (size,) = sections.words(size, sizes)
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
    """Data-parallel and Decoupled DiLoCo with either inner optimizer, to be tuned alike: `experiments.tune`.

    The arguments are as for `comparison`; decoupled is held against data-parallel with its inner optimizer.
    """
    entries = {entry["label"]: entry for entry in comparison(get_config, size, sizes)}
    batch = get_config(size).train.batch_size
    return {
        "rows": [
            _tuned(entries[name], inner, batch)
            for inner in INNER
            for name in ("data-parallel", "Decoupled DiLoCo")
        ],
        "grid": {
            "inner.learning_rate": (0.00075, 0.0015, 0.003, 0.006, 0.012, 0.024, 0.048),
            "train.batch_size": tuple(n for n in (batch // 8, batch // 4, batch // 2, batch, 2 * batch) if n),
            "inner.final_fraction": (0.0, 0.03, 0.1, 0.3),
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8, 0.9),
        },
        "together": ["inner.learning_rate", "train.batch_size"],  # a larger batch wants a larger rate
        "budget": 24,
        "choosing": {**CHOOSING, "eval.every": 0},
    }


def tables(
    get_config: Callable[[str], ConfigDict], sizes: tuple[str, ...]
) -> tuple[Callable[..., list[dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """A family's `get_comparison` and `get_tuning`, of a size; without one, of the first."""

    def get_comparison(size: str = sizes[0]) -> list[dict[str, Any]]:
        return comparison(get_config, size, sizes)

    def get_tuning(size: str = sizes[0]) -> dict[str, Any]:
        return tuning(get_config, size, sizes)

    return get_comparison, get_tuning


def _tuned(entry: dict[str, Any], inner: str, batch: int) -> dict[str, Any]:
    """A row of `tuning`, with the setting that each axis begins at."""
    row = {
        **entry,
        "label": f"{entry['label']}, {inner}",
        "inner.optimizer": INNER[inner],
        "inner.learning_rate": 0.006,
        "train.batch_size": batch,
        "inner.final_fraction": 0.1,
        "axes": ["inner.learning_rate", "train.batch_size", "inner.final_fraction"],
    }
    if entry["label"] == "data-parallel":
        return row
    return row | {
        "outer.optimizer": "nesterov",
        "outer.learning_rate": 0.7,
        "outer.momentum": 0.3,
        "axes": [*row["axes"], "outer.learning_rate", "outer.momentum"],
        "against": f"data-parallel, {inner}",
    }
