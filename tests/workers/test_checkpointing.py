"""When a learner's states are kept, and what becomes of those that cannot be."""

import queue
import threading

from ddiloco.workers.checkpointing import Checkpointing
from tests.remote.ends import TIMEOUT, until


class Disk:
    """Keeps what it is given, once it may."""

    def __init__(self):
        self.kept, self.may = [], threading.Event()

    def keep(self, state, snapshot):
        assert self.may.wait(TIMEOUT)
        if isinstance(state, Exception):
            raise state
        self.kept.append((state, snapshot) if snapshot else state)


def test_a_state_is_due_at_its_interval_unless_the_one_before_is_still_being_written():
    disk, told = Disk(), []
    checkpoints = Checkpointing(disk.keep, 0.01, "learners/0", told.append)
    until(lambda: checkpoints.due, "the interval")
    checkpoints.take(lambda: 1)
    until(lambda: checkpoints._due < __import__("time").monotonic(), "the next one")
    assert not checkpoints.due
    disk.may.set()
    until(lambda: checkpoints.due, "the end of the write")
    assert (disk.kept, told) == ([1], [])


def test_the_last_state_is_durable_once_the_learner_has_left_after_the_one_before():
    disk = Disk()
    checkpoints = Checkpointing(disk.keep, 1e9, "learners/0", None)
    checkpoints.take(lambda: 1)
    disk.may.set()
    checkpoints.last(lambda: 2)
    assert disk.kept == [1, 2]


def test_where_a_state_cannot_be_copied_or_written_that_is_an_alarm_and_the_next_is_kept():
    disk, told = Disk(), []
    disk.may.set()
    checkpoints = Checkpointing(disk.keep, 1e9, "learners/0", told.append)

    def no_memory():
        raise MemoryError("no copy")

    checkpoints.take(no_memory)
    checkpoints.take(lambda: OSError(28, "No space left on device"))
    until(lambda: len(told) == 2, "the alarms")
    assert [one.sentence for one in told] == [
        "learners/0: no copy: a checkpoint is not kept",
        "learners/0: No space left on device: a checkpoint is not kept",
    ]
    checkpoints.last(lambda: 3)
    assert disk.kept == [3]
    Checkpointing(disk.keep, 1e9, "learners/0", told.append).last(None)


def test_one_that_is_asked_for_goes_to_its_snapshot_and_what_became_of_it_is_told():
    disk, told, written = Disk(), [], queue.SimpleQueue()
    disk.may.set()
    checkpoints = Checkpointing(
        disk.keep, 0.0, "learners/0", told.append, lambda *told_of: written.put(told_of)
    )
    assert not checkpoints.due, "an interval of 0: none but for snapshots"
    for number, state in ((3, 1), (4, OSError(28, "No space left on device"))):
        checkpoints.ask(number)
        until(lambda: checkpoints.due, "the end of the write before")
        checkpoints.take(lambda state=state: state)
    assert [written.get(timeout=TIMEOUT) for _ in range(2)] == [(3, 1), (4, "No space left on device")]
    until(lambda: not checkpoints._writing or checkpoints._writing.done(), "the end of the write")
    checkpoints.ask(5)
    checkpoints.last(lambda: 2)
    assert disk.kept == [(1, 3), (2, 5)] and written.get(timeout=TIMEOUT) == (5, 2)
    nowhere = Checkpointing(None, 60.0, "None", told.append, lambda *told_of: written.put(told_of))
    nowhere.ask(6)
    assert written.get(timeout=TIMEOUT) == (6, "it has no folder for checkpoints") and not nowhere.due
    nowhere.last(lambda: 3)
    assert len(told) == 1


def test_who_leaves_writes_for_the_snapshot_and_in_the_newest_s_place():
    disk = Disk()
    disk.may.set()
    checkpoints = Checkpointing(disk.keep, 1e9, "learners/0", None)
    checkpoints.ask(3)
    checkpoints.last(lambda: 1)
    assert disk.kept == [(1, 3), 1]
