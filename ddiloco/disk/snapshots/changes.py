"""Which settings of a run may be others when it is resumed from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.settings.experiment import DECOUPLED_FAMILY, Experiment, to_json

MAY_CHANGE = frozenset(
    {
        "driver",
        "train",
        "inner",  # the arrays of its state are the same under all of its settings
        "sync",
        "outer",
        "mesh",
        "remote",
        "virtual",
        "eval",
        "sample",
        "log",
        "tape",
        "snapshot",
        "resume",
        "sdc_check_every",
        "data.data_dir",
        "data.eval_split",
        "data.held_out_pool",
        "data.keep",
        "data.prefetch",
        "data.sequence_length",  # a position in text is one in a document, whatever the rows
        "data.threads",
    }
)
MUST_STAY = {
    "model": "the arrays in the snapshot are of that model",
    "algorithm": "the snapshot is of that algorithm",
    "seed": "it orders the data, and positions in them are of that order",
    "data": "positions in the data are of those data",
    "sync.num_fragments": "versions and outer states are of those fragments",
    "outer.fragmentation": "versions and outer states are of those fragments",
    "outer.split_large": "versions and outer states are of those fragments",
    "outer.optimizer": "the outer states in the snapshot are of that optimizer",
}


def check_resumable(then: Experiment, now: Experiment, step: int = 0) -> None:
    """Sees that a run may go on under other settings; of two prefixes of a setting the longer one decides.

    Args:
      then: the settings that the snapshot was taken under.
      now: those to go on under.
      step: the global step of the snapshot.

    Raises:
      ConfigError: a setting has changed that must not; the message is one line.
    """
    before, after = dict(_leaves(to_json(then))), dict(_leaves(to_json(now)))
    for path in sorted(before.keys() | after.keys(), key=lambda path: (path != "model.name", path)):
        reason = why_fixed(path, then, now)
        if reason is None or before.get(path) == after.get(path):
            continue
        raise ConfigError(
            f"config.{path}: is {after.get(path)!r}, but must be {before.get(path)!r} "
            f"to resume from the snapshot: {reason}"
        )
    if now.train.steps < step:
        raise ConfigError(
            f"config.train.steps: is {now.train.steps}, but must be at least {step}, the step of the snapshot"
        )


def why_fixed(path: str, then: Experiment, now: Experiment) -> str | None:
    """Why the setting of this path must stay as it was; None: it need not."""
    if path == "algorithm" and {then.algorithm, now.algorithm} <= set(DECOUPLED_FAMILY):
        return None
    names = path.split(".")
    for length in range(len(names), 0, -1):
        prefix = ".".join(names[:length])
        if then.algorithm == "lone_learner" and prefix == "sync.num_learners":
            return "it is the share of the data that the lone learner reads"
        if prefix in MUST_STAY:
            return MUST_STAY[prefix]
        if prefix in MAY_CHANGE:
            return None
    return "it is not known to be sound to change"


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
