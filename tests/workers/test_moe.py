"""A mixture of experts in a decoupled run: it learns, and its routers are seen in steps and evaluations."""

import math

from ddiloco.telemetry import records
from tests import workbench
from tests.virtual_runs import run_virtual, virtual

EXPERTS = {
    "name": "moe",
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_dim": 16,
    "capacity_factor": 1.5,
}


def test_a_decoupled_run_learns_and_tells_of_its_routers(data_dir):
    experiment = virtual(
        data_dir,
        model={**workbench.SMALLEST["model"], **EXPERTS},
        train={"steps": 32},
        inner={"learning_rate": 0.01},
    )
    run = run_virtual(experiment)
    first, *_, last = run.of(records.Evaluated)
    assert run.outcome.finished
    assert last.loss < first.loss - 0.3
    for told in (*(e.statistics for e in (first, last)), *(s.metrics for s in run.of(records.StepDone))):
        assert 0 < float(told["router_entropy"]) <= math.log(4) + 1e-5
        assert 0 <= float(told["dropped_share"]) < 1
        assert 0 <= float(told["min_load"]) <= 1 <= float(told["max_load"]) == float(told["max_load/0"]) <= 4
        assert float(told["penalty"]) > 0
