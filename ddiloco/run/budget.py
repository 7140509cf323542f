"""The number of steps of a run whose budget is in tokens or in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ddiloco.baselines.virtual import steps_within
from ddiloco.outer.encoding import traffic
from ddiloco.roles.assembly import Assembly
from ddiloco.settings.experiment import BASELINES, Experiment, with_steps_of_tokens
from ddiloco.virtual.without_arrays import rehearse


def with_steps(experiment: Experiment, assembly: Callable[[], Assembly]) -> Experiment:
    """The experiment with `train.steps` set by its budget of tokens or of time, if it has one.

    Under the virtual driver a rehearsal finds the steps; else all learners are assumed to be equally fast.
    """
    if experiment.train.tokens is None and experiment.virtual.seconds is None:
        return experiment
    if experiment.driver == "virtual" and experiment.algorithm not in BASELINES:
        steps = rehearse(experiment, traffic(assembly().layout, experiment.outer))
    elif experiment.train.tokens is not None:
        return with_steps_of_tokens(experiment)
    else:
        steps = steps_within(experiment, assembly().num_params, experiment.virtual.seconds)
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps))
