"""Who carries out a plan: the right signals to the right processes, and everything undone in the end."""

import json
import signal
import threading

import pytest

from experiments.studies.chaos.killer import Journal, Killer, KillerAction, agenda
from experiments.studies.chaos.processes import PlannedFault

PLAN = (
    PlannedFault(1.0, "learner 0", "hang", 3.0),
    PlannedFault(2.0, "learner 1", "kill"),
    PlannedFault(3.0, "learner 0", "partition", 0.5),
)


class Desk:
    """A killer among processes that are numbers, with what it did."""

    def __init__(self, path):
        self.path, self.processes, self.gone = path, {"learner 0": 100, "learner 1": 101}, set()
        self.sent, self.cut = [], []
        self.journal = Journal(path)
        self.killer = Killer(
            self.processes.get,
            lambda target, apart: self.cut.append((target, apart)),
            self.journal,
            self._send,
        )

    def _send(self, pid, number):
        if pid in self.gone:
            raise ProcessLookupError
        self.sent.append((pid, number))

    def told(self):
        return [
            (line["event"], line["target"]) for line in map(json.loads, self.path.read_text().splitlines())
        ]


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path / "faults.jsonl")
    yield made
    made.journal.close()


def test_a_plan_is_carried_out(desk):
    for deed in agenda(PLAN):
        desk.killer.do(deed)
    assert desk.sent == [(100, signal.SIGSTOP), (101, signal.SIGKILL), (100, signal.SIGCONT)]
    assert desk.cut == [("learner 0", True), ("learner 0", False)]
    assert desk.told() == [(deed.what, deed.target) for deed in agenda(PLAN)]


def test_a_target_that_is_not_there_is_missed(desk):
    del desk.processes["learner 0"]
    desk.gone.add(101)
    for deed in agenda(PLAN[:2]):
        desk.killer.do(deed)
    assert desk.sent == []
    assert desk.told() == [("missed", "learner 0"), ("missed", "learner 1")]


def test_the_process_after_a_hung_one_that_died_is_left_alone(desk):
    desk.killer.do(KillerAction(0.0, "hang", "learner 0", 0))
    desk.processes["learner 0"] = 200
    desk.killer.do(KillerAction(1.0, "resume", "learner 0", 0))
    assert desk.sent == [(100, signal.SIGSTOP)]


def test_partitions_of_one_learner_that_overlap_end_with_the_last(desk):
    for what, fault in (("partition", 0), ("partition", 1), ("heal", 0)):
        desk.killer.do(KillerAction(0.0, what, "learner 0", fault))
    assert ("learner 0", False) not in desk.cut
    desk.killer.do(KillerAction(0.0, "heal", "learner 0", 1))
    assert desk.cut[-1] == ("learner 0", False)


def test_a_killer_that_is_stopped_undoes_what_it_did(desk):
    desk.killer.do(KillerAction(0.0, "hang", "learner 0", 0))
    desk.killer.do(KillerAction(0.0, "partition", "learner 1", 1))
    stop = threading.Event()
    stop.set()
    desk.killer.run([PlannedFault(1000.0, "learner 1", "kill")], stop)
    assert desk.sent == [(100, signal.SIGSTOP), (100, signal.SIGCONT)]
    assert desk.cut == [("learner 1", True), ("learner 1", False)]
