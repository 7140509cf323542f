"""Changes of a run's timing during the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddiloco.config import ConfigError, build, to_dict
from ddiloco.protocol.events import TimingSet
from ddiloco.protocol.policy import TIMING, SyncPolicy


def timing_of(sync: SyncPolicy, changes: Mapping[str, Any], reason: str = "") -> TimingSet:
    """The timing of a run's policy with these settings changed, by their names in `config.sync`.

    Raises:
      ConfigError: a setting cannot change during the run, or not to this value.
    """
    for name in changes:
        if name not in TIMING:
            raise ConfigError(f"config.sync.{name}: cannot change during a run; {', '.join(TIMING)} can")
    if sync.max_run_ahead is not None:
        waits = f"config.sync.max_run_ahead is {sync.max_run_ahead}: learners wait for merges"
        raise ConfigError(f"config.sync.{next(iter(changes))}: cannot change during this run, whose {waits}")
    policy = build(SyncPolicy, {**to_dict(sync), **changes}, "config.sync")
    if policy.overlap > (most := max(1, sync.overlap)):
        planned = f"must be at most {most}, for which memory was planned"
        raise ConfigError(f"config.sync.overlap: is {policy.overlap}, but {planned}")
    if (policy.quorum is None) is not (sync.quorum is None):
        wanted = "None" if sync.quorum is None else "a number"
        raise ConfigError(f"config.sync.quorum: is {policy.quorum}, but must be {wanted} during this run")
    return TimingSet.of(policy, reason)
