"""Learners whose layers are divided among pipeline stages, each stage's matrices among two devices."""

import threading

import numpy as np
import pytest

from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from ddiloco.virtual.run import VirtualRun as FleetRun
from tests import workbench
from tests.virtual_runs import VirtualRun, virtual


def run(data_dir, num_devices, mesh, **layers):
    shape = {**workbench.SMALLEST["model"], "num_layers": 2, "num_kv_heads": 2}
    settings = {"model": {**shape, **layers}, "mesh": mesh, "train": {"steps": 20, "batch_size": 4}}
    experiment = virtual(data_dir, "streaming", outer={"optimizer": "direct"}, **settings)
    taken = []
    with workbench.devices(num_devices):
        assembly = assembly_of(experiment)
        assembly.check()
        outcome = FleetRun(assembly, taken.append, threading.Event()).run()
    return VirtualRun(outcome, taken, experiment)


@pytest.mark.slow
def test_two_learners_with_two_stages_of_two_devices_give_the_numbers_of_one_device(data_dir):
    alone = run(data_dir, 1, {})
    staged = run(data_dir, 8, {"stage": 2, "tensor": 2}, scan_layers=True, remat="full")
    assert staged.merges("fragment", "step", "learners") == alone.merges("fragment", "step", "learners")
    assert len(staged.merges("fragment")) > 12
    for ours, expected in zip(staged.of(records.StepDone), alone.of(records.StepDone), strict=True):
        assert (ours.learner, ours.step, ours.tokens) == (expected.learner, expected.step, expected.tokens)
        assert float(ours.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=1e-5)
    assert max(record.step for record in staged.of(records.StepDone)) == 20
    for name, value in alone.outcome.params.items():
        np.testing.assert_allclose(staged.outcome.params[name], value, rtol=0, atol=1e-5, err_msg=name)
