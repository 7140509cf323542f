"""Snapshots over a real wire: the word that one has begun, the answers, and who is told where to go on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import events
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.snapshot_messages import snapshot_message, told_of_snapshot
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.storage.snapshots.store import PartFiles
from ddiloco.storage.tape.header import SnapshotName
from ddiloco.workers.exchange import SnapshotBegun
from ddiloco.workers.resumed_from import ResumedFrom
from ddiloco.workers.snapshots.messages import PartWritten, StateRecorded
from tests.remote.ends import LearnerEnd, SyncerEnd, ended, joined, report, until, update

NUMBERS = st.integers(1, 1 << 50)
FILES = PartFiles({"host_000": (7, "0" * 64), "state.json": (1, "f" * 64)})
MESSAGES = st.one_of(
    st.builds(StateRecorded, st.just(1), NUMBERS, NUMBERS, st.none()),
    st.builds(
        StateRecorded, st.just(1), NUMBERS, NUMBERS, NUMBERS, st.tuples(*[st.integers(0, 1 << 50)] * 2)
    ),
    st.builds(PartWritten, st.just(1), NUMBERS, st.just(FILES)),
    st.builds(PartWritten, st.just(1), NUMBERS, st.none(), st.text(min_size=1, max_size=80)),
)

FOURTH = SnapshotName(4, "ab" * 32)


@given(MESSAGES)
def test_what_a_learner_tells_about_snapshots_comes_as_it_went(message):
    sent = pb.FromLearner.FromString(snapshot_message(message).SerializeToString())
    assert told_of_snapshot(sent, 1, 2) == message


@pytest.mark.parametrize(
    "message",
    [
        pb.FromLearner(part_written=pb.PartWritten(snapshot=1, files="[")),
        pb.FromLearner(part_written=pb.PartWritten(snapshot=1, files='{"files": {}}')),
        pb.FromLearner(state_recorded=pb.StateRecorded(snapshot=1, recorded=True, versions=[1])),
        pb.FromLearner(state_recorded=pb.StateRecorded(snapshot=1 << 60)),
        pb.FromLearner(goodbye=True),
    ],
)
def test_what_cannot_be_is_malformed(message):
    with pytest.raises(WireError):
        told_of_snapshot(parse(pb.FromLearner, message.SerializeToString()), 1, 2)


def test_a_path_out_of_the_parts_folder_is_malformed():
    told = {"files": {"../../syncer/fragment-0000": [1, "0" * 64]}}
    with pytest.raises(WireError, match="malformed part"):
        told_of_snapshot(pb.FromLearner(part_written=pb.PartWritten(files=json.dumps(told))), 0, 2)


def test_a_learner_hears_that_a_snapshot_has_begun_and_answers(ends):
    syncer, learner = ends
    joined(syncer, learner).deliver(SnapshotBegun(3, (0, 0)))
    assert learner.next(SnapshotBegun).number == 3
    answers = [StateRecorded(0, 100, 3, 8, (0, 0)), PartWritten(0, 3, FILES)]
    for answer in answers:
        learner.client.tell_of_snapshot(answer)
    assert [syncer.next(type(answer)) for answer in answers] == answers


def test_only_versions_made_after_the_cut_carry_the_snapshots_number(ends):
    syncer, learner = ends
    link = joined(syncer, learner)
    link.deliver(SnapshotBegun(3, (5, 5)))
    learner.next(SnapshotBegun)
    epochs = []
    for fragment, version in ((0, 5), (0, 6), (1, 4)):
        link.deliver(update(fragment, version))
        epochs.append(learner.next(events.UpdateArrived).epoch)
    assert epochs == [0, 3, 0]


def test_a_learner_of_another_session_gets_updates_without_a_number(ends):
    syncer, first = ends
    with ended(second := LearnerEnd(syncer.address, learner=1)):
        joined(syncer, first).deliver(SnapshotBegun(3, (0, 0)))
        link = joined(syncer, second, number=1)
        link.deliver(update(0, 7))
        assert second.next(events.UpdateArrived).epoch == 0


def test_a_learner_is_told_of_the_snapshot_until_a_process_of_it_has_come_back():
    resumed = ResumedFrom(FOURTH, {0: 90})
    assert resumed.number_for(0, newest_incarnation=90) == 4
    assert resumed.number_for(0, newest_incarnation=91) == 0
    assert resumed.number_for(1, newest_incarnation=0) == 4


def test_which_snapshot_a_run_goes_on_from_outlives_its_syncer(tmp_path):
    ResumedFrom(FOURTH, {0: 90, 3: 7}).save(tmp_path)
    assert ResumedFrom.load(tmp_path) == ResumedFrom(FOURTH, {0: 90, 3: 7})
    (tmp_path / "resumed_from.json").write_text("{")
    assert ResumedFrom.load(tmp_path) is None
    assert ResumedFrom.load(tmp_path / "elsewhere") is None


def test_the_first_process_of_a_learner_hears_where_its_state_is_and_the_next_one_does_not():
    syncer = SyncerEnd(resumed_from=ResumedFrom(FOURTH, {0: 50}))
    first = LearnerEnd(syncer.address, process=100)
    with ended(first, syncer):
        until(first.client.accepted.is_set, "the welcome")
        assert first.client.resume_from == 4
        first.send(events.LearnerJoined(0, 100, 8, (1, 1)))
        syncer.next(events.LearnerJoined)
        first.send(report(0, 100, 9))
        first.client.finish(0.0)
        second = LearnerEnd(syncer.address, process=200)
        with ended(second):
            until(second.client.accepted.is_set, "the second welcome")
            assert second.client.resume_from == 0
