"""What a part of the syncer does with offers around a snapshot that it may have missed the beginning of."""

import pytest

from ddiloco.roles.snapshots.fragments import FragmentsRecording


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
