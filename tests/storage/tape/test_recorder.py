"""Tapes as they are written: when what is on the disk, and what a disk that refuses does to the run."""

import errno
import os
from unittest import mock

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.tape.entries import Adopted, Committed, End, InnerOrigin
from ddiloco.storage.tape.header import Header
from ddiloco.storage.tape.recorder import LearnerTape, SyncerTape, next_syncer, syncer_tape
from ddiloco.telemetry import records
from experiments.studies.replay.reading import read_tape
from tests.workbook import MACHINE

LEARNER = Header("learner", 3, 7, "local", "c0", "1a", MACHINE, 1.0, 2.0)
SYNCER = Header(
    "syncer", None, 1, "local", "c0", "1a", MACHINE, 1.0, 2.0, None, SyncerState.initial(1), ("00",)
)


def things(path):
    return [entry.content for entry in read_tape(path).entries]


def test_a_step_is_written_in_one_piece_once_it_is_finished(tmp_path):
    tape = LearnerTape(3, 7, path := tmp_path / "a.tape", LEARNER)
    writes = []
    write = os.write
    with mock.patch.object(os, "write", lambda file, data: writes.append(len(data)) or write(file, data)):
        tape.heard(events.StepStarted(10), 1.5)
        assert (writes, things(path)) == ([], [])
        tape.heard(events.StepFinished(), 1.6)
    assert len(writes) == 1
    assert things(path) == [events.StepStarted(10), events.StepFinished()]


def test_a_state_that_is_given_away_is_on_the_disk_first_under_a_number_of_its_own(tmp_path):
    tape = LearnerTape(3, 7, path := tmp_path / "a.tape", LEARNER)
    tape.adopted(fresh=False, origin=InnerOrigin(1, 2, 3))
    assert [tape.gave(), tape.gave()] == [InnerOrigin(3, 7, 1), InnerOrigin(3, 7, 2)]
    assert things(path)[0] == Adopted(InnerOrigin(1, 2, 3), False)
    assert len(things(path)) == 3


def test_a_learner_without_a_tape_numbers_what_it_gives_all_the_same():
    tape = LearnerTape(3, 7)
    tape.heard(events.StepFinished(), 1.0)
    assert not tape.on
    assert tape.gave() == InnerOrigin(3, 7, 1)
    tape.end()


def test_what_a_merge_is_made_of_is_written_before_it_begins_and_a_version_before_it_is_sent(tmp_path):
    tape = SyncerTape(path := tmp_path / "a.tape", SYNCER)
    tape.heard(events.Timeout(), [], 0.5)
    assert things(path) == []
    tape.heard(events.Timeout(), [actions.Merge(RoundId(1, 0), 1, ())], 0.6)
    assert things(path) == [events.Timeout()] * 2
    tape.heard(events.MergeFinished(RoundId(1, 0)), [], 0.7)
    tape.committed(0, 1, b"x" * 32)
    assert things(path)[2:] == [events.MergeFinished(RoundId(1, 0)), Committed(0, 1, b"x" * 32)]
    tape.end((1,))
    assert read_tape(path).ended
    assert things(path)[-1] == End((1,))


def test_a_syncer_that_merges_nothing_is_on_the_disk_within_a_second(tmp_path):
    tape = SyncerTape(path := tmp_path / "a.tape", SYNCER)
    tape.heard(events.Timeout(), [], 10.0)
    tape.heard(events.Timeout(), [], 10.5)
    assert len(things(path)) == 1
    tape.heard(events.Timeout(), [], 11.0)
    assert len(things(path)) == 3


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_ends_the_tape_with_an_alarm_and_not_the_run(tmp_path, written):
    alarms = []
    tape = LearnerTape(3, 7, path := tmp_path / "a.tape", LEARNER, alarms.append)
    tape.heard(events.StepFinished(), 1.0)
    write, calls = os.write, []

    def full(file, data):
        calls.append(len(data))
        if len(calls) == 1 and written:
            return write(file, data[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "write", full):
        tape.heard(events.StepFinished(), 2.0)
    tape.heard(events.StepFinished(), 3.0)
    tape.gave()
    tape.end()
    [alarm] = alarms
    assert isinstance(alarm, records.Alarm)
    assert alarm.sentence == (
        f"{path}: No space left on device: the tape ends here, and the run cannot be replayed beyond it"
    )
    assert things(path) == [events.StepFinished()]
    assert read_tape(path).torn == written


def test_a_folder_that_cannot_be_written_to_is_an_alarm_and_no_tape(tmp_path):
    (tmp_path / "tape").write_text("a file where a folder must be")
    alarms = []
    tape = LearnerTape(3, 7, tmp_path / "tape" / "a.tape", LEARNER, alarms.append)
    tape.heard(events.StepFinished(), 1.0)
    assert not tape.on
    assert len(alarms) == 1


def test_the_syncers_processes_are_counted_by_their_tapes(tmp_path):
    assert next_syncer(tmp_path) == 1
    for number in (1, 2, 11):
        SyncerTape(syncer_tape(tmp_path, number), SYNCER)
    assert next_syncer(tmp_path) == 12


def test_a_tape_that_has_grown_to_its_bound_ends_with_an_alarm(tmp_path):
    alarms = []
    tape = LearnerTape(3, 7, path := tmp_path / "a.tape", LEARNER, alarms.append, max_bytes=2000)
    for n in range(1000):
        tape.heard(events.StepFinished(), float(n))
    tape.end()
    assert path.stat().st_size < 2500 and not read_tape(path).torn
    [alarm] = alarms
    assert "a.tape: it has grown to its largest size: the tape ends here" in alarm.sentence
