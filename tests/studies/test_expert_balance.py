"""Scores of the learners beside those of the global model, while learners come and go."""

import threading

from ddiloco.virtual.lives import Change, write_trace
from experiments.studies import expert_balance
from experiments.studies.expert_balance import AVERAGE, GLOBAL
from tests import workbench
from tests.virtual_runs import virtual


def test_learners_that_are_dead_at_an_evaluation_have_no_scores(data_dir, tmp_path):
    changes = [Change(9.5, 0, "fail"), Change(21.5, 1, "fail")]
    write_trace(tmp_path / "lives.csv", changes)
    lives = {"lives": "trace", "trace": str(tmp_path / "lives.csv")}
    e = virtual(data_dir, virtual=lives, eval={"every": 4}, train={"steps": 40})
    with workbench.devices(1):
        points = expert_balance.scored_run(e, threading.Event())
    scored: dict[int, list[str]] = {}
    for point in points:
        scored.setdefault(point["step"], []).append(point["name"])
    one = sorted(["learner 1", AVERAGE, GLOBAL])
    found = {step: sorted(names) for step, names in scored.items()}
    assert found.pop(0) == found.popitem()[1] == [GLOBAL]
    assert found[4] == sorted(["learner 0", *one])
    assert found[16] == one
