"""What a part of the syncer does with offers around a snapshot that it may have missed the beginning of."""

import pytest

from ddiloco.roles.snapshots.fragments import FragmentsRecording


def recording(epoch=0):
    return FragmentsRecording(0, (0, 1), epoch, None, lambda written: None)


def test_an_offer_after_its_learners_state_waits_until_the_part_has_recorded_its_own():
    one = recording()
    assert not one.holds(0, 0, 0, "before")
    assert one.holds(0, 0, 1, "after")
    one.begun(1)
    assert one.record(None, ()) == ["after"]
    assert not one.holds(0, 0, 1, "next")


@pytest.mark.parametrize("begun", [False, True])
def test_what_waits_for_a_snapshot_that_was_given_up_meanwhile_goes_on(begun):
    one = recording()
    assert one.holds(0, 0, 1, "old") and one.holds(0, 0, 1, "new") and one.holds(1, 1, 2, "later")
    if begun:
        one.begun(1)
    assert one.missed(1) == ["new"]
    assert not one.holds(0, 0, 1, "next")
    assert one.holds(1, 1, 2, "later")
    one.begun(2)
    assert one.record(None, ()) == ["later"]


def test_an_authority_that_takes_snapshots_only_since_its_restart_is_followed():
    one = recording(epoch=1 << 62)  # of one that took none
    one.missed(0)
    assert one.holds(0, 0, 1, "after")
    one.begun(1)
    assert one.record(None, ()) == ["after"]
