"""Which settings may change before a run resumes from a snapshot."""

from __future__ import annotations

from ddiloco.config import ConfigError, Leaf
from ddiloco.settings.experiment import DECOUPLED_FAMILY, Experiment, all_settings


def check_resumable(then: Experiment, now: Experiment, step: int = 0) -> None:
    """Checks that a run may resume with other settings.

    Args:
      then: the settings of the run that took the snapshot.
      now: the settings to resume with.
      step: the global step of the snapshot.

    Raises:
      ConfigError: a setting has changed that must not change; the message is one line.
    """
    before = {leaf.path: leaf for leaf in all_settings(then)}
    after = {leaf.path: leaf for leaf in all_settings(now)}
    for path, leaf in (before | after).items():
        was, is_now = (found[path].value if path in found else None for found in (before, after))
        reason = why_fixed(leaf, then, now)
        if reason is not None and was != is_now:
            raise ConfigError(
                f"config.{path}: is {is_now!r}, but must be {was!r} to resume from the snapshot: {reason}"
            )
    if now.train.steps < step:
        raise ConfigError(
            f"config.train.steps: is {now.train.steps}, but must be at least {step}, the step of the snapshot"
        )


def why_fixed(leaf: Leaf, then: Experiment, now: Experiment) -> str | None:
    """Why this setting must not change; None: it may."""
    if leaf.path == "algorithm" and {then.algorithm, now.algorithm} <= set(DECOUPLED_FAMILY):
        return None
    if leaf.path == "sync.num_learners" and then.algorithm == "lone_learner":
        return "it is the share of the data that the lone learner reads"
    return leaf.metadata["because"] if leaf.metadata["may_change"] == "never" else None
