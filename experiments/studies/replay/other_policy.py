"""A recorded run's steps, joins and losses met by another policy, beside what was recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ddiloco.config import build, to_dict
from ddiloco.protocol.policy import SyncPolicy
from experiments.front import cli
from experiments.studies.replay import what_if
from experiments.studies.replay.recorded import Recorded


def compare(recorded: Recorded, overrides: Sequence[tuple[str, str]]) -> None:
    """Prints figures of the run, its own policy simulated, and the one with these overrides of the policy."""
    changes = {}
    for path, value in overrides:
        group, _, name = path.partition(".")
        if group != "sync" or name == "num_learners":
            raise cli.UsageError(f"config.{path}: --what_if changes config.sync, but for num_learners")
        changes[name] = cli.literal(value)
    sync, steps = recorded.experiment.sync, recorded.experiment.train.steps
    policy = build(SyncPolicy, {**to_dict(sync), **changes}, "config.sync")
    columns = {
        "recorded": what_if.recorded(recorded.plan),
        "same policy": what_if.what_if(recorded.plan, sync, steps),
        "what if": what_if.what_if(recorded.plan, policy, steps),
    }
    print(", ".join(f"{name}={value}" for name, value in changes.items()) or "nothing is changed")
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for field in dataclasses.fields(what_if.Outcome):
        values = [getattr(outcome, field.name) for outcome in columns.values()]
        print(f"{field.name:18}" + "".join(f"{value:14.6g}" for value in values))
