"""Presets made smaller: they still are what they were, and have as many rounds as were asked for."""

import pytest

from ddiloco.protocol.schedule import Schedule
from ddiloco.settings.experiment import parse
from experiments.front import cli
from experiments.studies import false_alarms


@pytest.mark.parametrize("preset", false_alarms.PRESETS)
def test_a_smaller_preset_has_a_thousand_rounds_and_the_fleet_of_the_preset(preset):
    whole, smaller = parse(cli.load_config(preset)), parse(false_alarms.smaller(preset))
    schedule = Schedule(smaller.sync.num_fragments, smaller.sync.interval)
    rounds = sum(len(schedule.due(step)) for step in range(1, smaller.train.steps + 1))
    assert rounds >= false_alarms.ROUNDS
    assert smaller.driver == "virtual"
    assert smaller.outer.guard == whole.outer.guard and smaller.outer.guard.gates
    assert smaller.virtual.lives == whole.virtual.lives
    assert (smaller.sync.num_learners, smaller.sync.quorum) == (whole.sync.num_learners, whole.sync.quorum)
    assert type(smaller.model) is type(whole.model)
