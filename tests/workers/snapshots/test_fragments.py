"""What a part of the syncer does with offers around a snapshot that it may have missed the beginning of."""

import concurrent.futures

import numpy as np
import pytest
from ddiloco.workers.snapshots.fragments import FragmentsRecording

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.snapshots.parts import PartFiles


def recording(epoch=0):
    return FragmentsRecording(0, (0, 1), epoch, None, lambda written: None, patience=60.0)


def test_an_offer_after_its_learners_state_waits_until_the_part_has_recorded_its_own():
    one = recording()
    assert not one.awaits(0, 0, 0.0) and one.awaits(0, 1, 0.0)
    one.begun(1)
    assert one.awaits(0, 1, 0.0)
    one.record(None, ())
    assert not one.awaits(0, 1, 0.0)


@pytest.mark.parametrize("begun", [False, True])
def test_what_waits_for_a_snapshot_that_was_given_up_meanwhile_goes_on(begun):
    one = recording()
    assert one.awaits(0, 1, 0.0) and one.awaits(1, 2, 0.0)
    if begun:
        one.begun(1)
    one.missed(1)
    assert not one.awaits(0, 1, 0.0) and one.awaits(1, 2, 0.0)
    one.begun(2)
    one.record(None, ())
    assert not one.awaits(1, 2, 0.0)


def test_an_authority_that_takes_snapshots_only_since_its_restart_is_followed():
    one = recording(epoch=1 << 62)  # of one that took none
    one.missed(0)
    assert one.awaits(0, 1, 0.0)


def test_offers_of_learners_that_know_a_snapshot_which_a_syncer_on_an_older_disk_does_not_wait_no_longer():
    one = recording(epoch=3)
    assert one.awaits(0, 5, 10.0) and one.awaits(0, 5, 69.0)
    assert not one.awaits(0, 5, 71.0)
    assert one.awaits(1, 5, 71.0)  # of another
    one.begun(4)
    one.record(None, ())
    assert not one.awaits(0, 5, 72.0)
    assert one.awaits(0, 6, 100.0)  # after a snapshot that both know


class SlowWriter:
    """Writes what it is given once it is told to."""

    def __init__(self):
        self.given = []

    def write(self, number, name, part):
        self.given.append(concurrent.futures.Future())
        return self.given[-1]


def test_a_part_waits_for_no_other_that_is_still_being_written():
    """Each holds a copy of the fragments, and a disk this slow would let them pile up."""
    writer, told = SlowWriter(), []
    one = FragmentsRecording(0, (0,), 0, writer, told.append, patience=60.0)
    state = SyncerCore(SyncPolicy(num_learners=1, num_fragments=1, interval=4)).state()
    fragment = FragmentState(0, (np.ones(2, np.float32),), ())
    for number in (1, 2):
        one.begun(number)
        one.record(state, [fragment])
    assert len(writer.given) == 1
    writer.given[0].set_result(PartFiles({"host_000": (2, "0" * 64)}))
    one.begun(3)
    one.record(state, [fragment])
    assert len(writer.given) == 2
    assert [(each.number, each.problem) for each in told] == [
        (2, "the part before this one is still being written"),
        (1, ""),
    ]


def test_what_was_gathered_for_a_snapshot_that_was_given_up_is_not_written_twice():
    writer = SlowWriter()
    one = FragmentsRecording(0, (0,), 4, writer, lambda written: None, patience=60.0)
    state = SyncerCore(SyncPolicy(num_learners=1, num_fragments=1, interval=4)).state()
    one.begun(5)  # gathers behind a slow commit, and is given up
    one.begun(6)
    for version in (2, 3):
        one.record(state, [FragmentState(version, (np.ones(2, np.float32),), ())])
        for future in writer.given:
            future.done() or future.set_result(PartFiles({"host_000": (2, "0" * 64)}))
    assert len(writer.given) == 1
