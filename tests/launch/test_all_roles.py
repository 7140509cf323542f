"""Which processes `driver=remote` starts."""

import threading

from ddiloco.launch import supervisor
from tests.workbench import experiment


class Started:
    """In a supervisor's place: keeps what it is given, and ends at once."""

    def __init__(self, roles, *args):
        self.given.append((roles.syncer, roles.learners))

    def run(self, stop):
        return 0


def test_a_fleet_that_may_grow_has_all_its_learners_and_a_token_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(Started, "given", [], raising=False)
    monkeypatch.setattr(supervisor, "Supervisor", Started)
    monkeypatch.setattr("ddiloco.launch.processes.warm_up", lambda: None)
    e = experiment("none", driver="remote", remote={"max_learners": 3})
    assert supervisor.run_all(e, ["--config=x.py"], tmp_path, threading.Event(), print) == 0
    [(syncer, learners)] = Started.given
    assert [role.name for role in learners] == ["learner 0", "learner 1", "learner 2"]
    tokens = syncer.environment["DDILOCO_TOKEN"].splitlines()
    assert [line.split()[0] for line in tokens] == ["0", "1", "2"]


def test_each_host_of_a_learner_that_may_lose_some_is_restarted_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(Started, "given", [], raising=False)
    monkeypatch.setattr(supervisor, "Supervisor", Started)
    monkeypatch.setattr("ddiloco.launch.processes.warm_up", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    e = experiment("none", driver="remote", remote={"hosts": (2, 1), "min_hosts": 1})
    assert supervisor.run_all(e, ["--config=x.py"], tmp_path, threading.Event(), print) == 0
    [(_, learners)] = Started.given
    assert [(role.name, role.hosts) for role in learners] == [
        ("learner 0", 1),
        ("learner 0.1", 1),
        ("learner 1", 1),
    ]
    places = [[word for word in role.arguments if word.startswith("--process")] for role in learners]
    assert places == [["--processes=2", "--process=0"], ["--processes=2", "--process=1"], []]
    assert [role.environment["CUDA_VISIBLE_DEVICES"] for role in learners] == ["0", "1", "2,3"]
