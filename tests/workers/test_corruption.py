"""A learner that checks its steps: what errs is told with the step, the device and the learner."""

import dataclasses
import socket
import threading
from unittest import mock

import jax
import pytest

from ddiloco.local.run import LocalRun
from ddiloco.outer.fragments import take
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import ConfigError
from ddiloco.telemetry import records
from ddiloco.workers.learner_arrays import TrainingArrays
from tests import workbench
from tests.training.test_corruption import flipped

pytestmark = pytest.mark.usefixtures("one_device")


class Erring:
    """A program that flips one bit of one parameter in some of its calls."""

    def __init__(self, program, calls):
        self._program, self._calls, self._count = program, calls, 0

    def __getattr__(self, name):
        return getattr(self._program, name)

    def step(self, state, batch, clock):
        state, metrics = self._program.step(state, batch, clock)
        self._count += 1
        if self._count in self._calls:
            name = min(state.params)
            wrong = flipped(state.params[name], jax.devices()[0])
            state = dataclasses.replace(state, params={**state.params, name: wrong})
        return state, metrics


@pytest.fixture(scope="module")
def assembly(data_dir):
    return assembly_of(workbench.experiment(data_dir, train={"verify_every": 3}))


DEVICE = f"{jax.devices()[0]} of {socket.gethostname()}"


def stepped(assembly, equipment, told, make_arrays=TrainingArrays, steps=10):
    """The parameters after so many steps, and which steps were dropped."""
    arrays = make_arrays(equipment, lambda step, devices: told.append((step, devices)))
    initial = assembly.initial_parameters()
    arrays.adopt([take(assembly.layout, p, initial) for p in range(assembly.layout.num_fragments)])
    dropped = [clock + 1 for clock in range(steps) if int(arrays.step(clock)[1]["skipped"])]
    return {name: jax.device_get(value) for name, value in arrays.params.items()}, dropped


@pytest.mark.parametrize(
    "call", [7, pytest.param(8, marks=pytest.mark.slow)]
)  # steps 1, 2, 3 twice, 4, 5, 6 twice
def test_a_step_that_comes_out_otherwise_is_told_and_dropped_and_no_other(assembly, call):
    equipment, told = assembly.own_equipment(0), []
    program = Erring(equipment.program, calls={call})
    after, dropped = stepped(assembly, dataclasses.replace(equipment, program=program), told, steps=6)
    assert (told, dropped) == ([(6, [DEVICE])], [6])
    before, _ = stepped(assembly, assembly.own_equipment(0), [], steps=5)
    workbench.assert_equal(after, before)


def test_a_host_of_several_waits_for_a_checked_step_before_it_hands_it_out_again(assembly):
    calls = []

    class Recorded(Erring):
        def step(self, state, batch, clock):
            calls.append("step")
            return super().step(state, batch, clock)

    class Settling(TrainingArrays):
        def _settled(self, arrays):
            calls.append("settled")
            return arrays

    equipment = assembly.own_equipment(0)
    equipment = dataclasses.replace(equipment, program=Recorded(equipment.program, calls=()))
    stepped(assembly, equipment, [], Settling)
    plain, copied = ["step", "settled"], ["settled", "step", "settled"]
    assert calls[1:] == [*[*plain, *plain, *copied, *copied] * 3, *plain]


def test_checks_change_no_parameter(assembly):
    told = []
    checked, _ = stepped(assembly, assembly.own_equipment(0), told)
    unchecked = dataclasses.replace(assembly.own_equipment(0), verify_every=0)
    workbench.assert_equal(checked, stepped(assembly, unchecked, told)[0])
    assert told == []


def test_a_run_raises_an_alarm_with_learner_step_and_device(assembly):
    equip = assembly.equipment

    def equipment():
        first, second = equip()
        return [first, dataclasses.replace(second, program=Erring(second.program, calls={4}))]

    taken = []
    with mock.patch.object(assembly, "equipment", equipment):
        outcome = LocalRun(assembly, taken.append, threading.Event()).run()
    assert outcome.finished
    [alarm] = [record for record in taken if isinstance(record, records.Alarm)]
    assert alarm.sentence.startswith("learner 1, step ")
    assert f": {DEVICE} gave other bits as the step was computed again: " in alarm.sentence
    [noted] = [r for r in taken if isinstance(r, records.Noted) and r.name == "sdc"]
    assert (noted.values["learner"], noted.values["devices"]) == (1, DEVICE)


def test_a_baseline_has_no_learner_to_check(data_dir):
    with pytest.raises(ConfigError, match=r"train.verify_every: is 5, but must be 0 for lone_learner"):
        workbench.experiment(data_dir, "lone_learner", train={"verify_every": 5})
