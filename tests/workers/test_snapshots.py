"""Taking snapshots: learners write first, then the syncer pins; who does not write is left out."""

import dataclasses
import errno
import queue

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.snapshots import SnapshotStore
from ddiloco.telemetry import records
from ddiloco.workers.exchange import CheckpointWritten
from ddiloco.workers.snapshots import SnapshotTaker
from tests.workbench import experiment

LIMIT = 60.0


@dataclasses.dataclass
class Core:
    """What a taker asks of a core."""

    live: tuple[int, ...] = (0, 1)
    step: int = 8

    def state(self):
        return SyncerState.initial(3).with_incarnations(tuple((m, 10 + m) for m in self.live))

    def longest_step(self, learners):
        return 2.0


class Desk:
    """A taker whose time is given, and what it has recorded."""

    def __init__(self, data_dir, folder, pin):
        self.inbox, self.noted, self.alarms = queue.SimpleQueue(), [], []
        e = experiment(data_dir, snapshot={"every": 4, "timeout": 30.0}, train={"steps_in_flight": 2})
        store = SnapshotStore(folder / "snapshots", 2)
        self.taker = SnapshotTaker(store, e, "run", pin, 3, self.inbox.put, self.record)

    def record(self, one):
        match one:
            case records.Flush():
                one.done()
            case records.Alarm():
                self.alarms.append(one.sentence)
            case records.Noted():
                self.noted.append((one.name, one.values))

    def end(self):
        """Takes what the thread says at its end; what was recorded of the snapshot."""
        self.taker.take(self.inbox.get(timeout=LIMIT))
        return self.noted[-1]


def pinned(folder, versions):
    folder.mkdir()
    (folder / "fragment-0000").write_bytes(bytes(versions) or b"-")
    return 8


@pytest.fixture
def desk(data_dir, tmp_path):
    return Desk(data_dir, tmp_path, pinned)


def test_the_syncer_pins_once_all_have_written(desk):
    assert not desk.taker.due(3) and desk.taker.due(4)
    number, asked = desk.taker.begin(Core(), now=100.0)
    assert (number, sorted(asked)) == (1, [(0, 10), (1, 11)])
    assert desk.taker.begin(Core(), now=100.0) == (0, ()), "one at a time"
    desk.taker.take(CheckpointWritten(0, 1, (3, 4, 5)))
    assert desk.inbox.empty() and not list(desk.taker.folder.glob("*/syncer"))
    desk.taker.take(CheckpointWritten(1, 7, (3, 4, 5))), "of another snapshot"
    assert desk.inbox.empty()
    desk.taker.take(CheckpointWritten(1, 1, (4, 3, 5)))
    name, values = desk.end()
    assert (name, values["number"], values["step"]) == ("snapshot", 1, 8)
    assert (values["learners"], values["absent"], values["bytes"]) == ([0, 1], [], 3)
    snapshot = SnapshotStore(desk.taker.folder, 2).open(1)
    assert snapshot.header.learners == (0, 1)
    pinned_versions = (snapshot.folder / "syncer" / "fragment-0000").read_bytes()
    assert [*pinned_versions] == [4, 4, 5], "as new as any in a checkpoint"
    assert not desk.taker.due(11) and desk.taker.due(12) and not desk.alarms


@pytest.mark.parametrize(
    "left",
    [
        lambda taker: taker.heard(events.LearnerLost(1, 11, "killed")),
        lambda taker: taker.heard(events.LearnerJoined(1, 12)),
        lambda taker: taker.silent(1),
        lambda taker: taker.take(CheckpointWritten(1, 1, (), "No space left on device")),
        lambda taker: taker.timeout(100.0 + 30.0 + 3 * 2.0),
    ],
    ids=["lost", "joined again", "silent", "disk full", "late"],
)
def test_a_learner_that_writes_none_is_left_out(desk, left):
    desk.taker.begin(Core(), now=100.0)
    for no_news in (events.LearnerLost(1, 10, "of before"), events.LearnerJoined(1, 11)):
        desk.taker.heard(no_news)
    desk.taker.timeout(100.0 + 30.0)
    desk.taker.take(CheckpointWritten(0, 1, (3, 4, 5)))
    assert desk.inbox.empty(), "one is waited for"
    left(desk.taker)
    name, values = desk.end()
    assert (name, values["learners"], values["absent"]) == ("snapshot", [0], [1])


def test_one_that_no_learner_has_written_for_is_given_up_with_an_alarm(desk):
    desk.taker.begin(Core(), now=100.0)
    desk.taker.silent(0)
    desk.taker.take(CheckpointWritten(1, 1, (), "No space left on device"))
    [(name, values)] = desk.noted
    assert name == "snapshot_given_up"
    assert values["reason"] == "no learner wrote a checkpoint: learner 0: it is silent"
    assert desk.alarms[0].endswith("it is silent: a snapshot is given up; training continues")
    assert desk.taker.begin(Core(), now=100.0)[0] == 2


def test_a_syncer_without_learners_pins_what_it_has(desk):
    assert desk.taker.begin(Core(live=()), now=100.0) == (1, [])
    assert desk.end()[1]["learners"] == []


def test_a_disk_that_refuses_costs_the_snapshot_alone(data_dir, tmp_path):
    def full(folder, versions):
        raise OSError(errno.ENOSPC, "No space left on device")

    desk = Desk(data_dir, tmp_path, full)
    desk.taker.begin(Core(live=(0,)), now=100.0)
    desk.taker.take(CheckpointWritten(0, 1, (3, 4, 5)))
    assert desk.end()[0] == "snapshot_given_up"
    assert desk.alarms == [
        f"{desk.taker.folder}: No space left on device: a snapshot is given up; training continues"
    ]
    desk.taker.folder.rmdir()
    desk.taker.folder.write_text("a file where a folder must be")
    assert desk.taker.begin(Core(), now=100.0) == (0, ())
    assert desk.noted[-1][0] == "snapshot_given_up"


def test_of_a_disk_that_hangs_an_alarm_tells_once(data_dir, tmp_path):
    hangs = queue.SimpleQueue()
    desk = Desk(data_dir, tmp_path, lambda folder, versions: hangs.get(timeout=LIMIT))
    desk.taker.begin(Core(live=(0,)), now=100.0)
    desk.taker.take(CheckpointWritten(0, 1, (3, 4, 5)))
    for now in (200.0, 300.0):
        desk.taker.timeout(now)
    assert desk.alarms[0].endswith("is not complete, and none is taken meanwhile; training continues")
    assert len(desk.alarms) == 1 and desk.taker.under_way and desk.taker.next_deadline() is None
    desk.taker.close()
    assert desk.noted[-1] == ("snapshot_given_up", {"number": 1, "step": 8, "reason": "the run is over"})
    hangs.put(8)
