"""The syncer's side of a snapshot: what is awaited, what is in flight, what is left out, what gives it up."""

import concurrent.futures
import errno
import threading
import time
import weakref

import numpy as np
import pytest

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol import events
from ddiloco.protocol.messages import FragmentCounters, Report, RoundId
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage import array_file
from ddiloco.storage.snapshots import parts
from ddiloco.storage.snapshots.parts import SYNCER_PART, learner_part, parts_folder, read_part
from ddiloco.storage.snapshots.store import PartFiles, SnapshotPart, SnapshotStore
from ddiloco.workers.snapshots.messages import PartWritten, StateRecorded
from tests.remote.ends import until
from tests.workers.snapshots.desk import PATIENCE, Desk


def report(learner, step, incarnation=1):
    return events.StepReported(Report(learner, incarnation, step, (FragmentCounters(0, step, 8 * step),)))


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path / "snapshots")
    yield desk
    desk.taker.close(PATIENCE)


def test_one_is_wanted_at_every_multiple_and_not_while_another_is_under_way(desk):
    assert [desk.taker.wanted(step) for step in (3, 4, 8)] == [False, True, False]  # 4 is being gathered
    desk.taker.begin(desk.core, [], 0.0)  # in vain
    assert [desk.taker.wanted(step) for step in (7, 9)] == [False, True]
    desk.begin()
    assert not desk.taker.wanted(20)


def test_it_is_complete_when_every_learner_has_recorded_and_every_part_is_written(desk):
    assert desk.begin().learners == (0, 1)
    for learner in (0, 1):
        desk.mark(learner)
        desk.write(learner)
    desk.settle()
    [(name, values)] = desk.noted
    assert (name, values["learners"], values["absent"]) == ("snapshot", [0, 1], [])
    assert desk.flushed_before  # so the run's files have what the snapshot follows from
    snapshot = desk.newest()
    assert set(snapshot.parts) == {SYNCER_PART, "learner_000", "learner_001"}
    part = snapshot.part(SYNCER_PART)
    assert part.state["incarnations"] == [[0, 1], [1, 1]]
    np.testing.assert_array_equal(part.arrays["outer/0/0"], [1, 2, 3])
    assert list(parts_folder(desk.folder).iterdir()) == []


def test_no_copy_of_the_fragments_stays_while_learners_still_write(desk):
    piece = np.arange(3, dtype=np.float32)
    desk.taker.begin(desk.core, [FragmentState(0, (piece,), ())], 0.0)
    held = weakref.ref(piece)
    del piece
    for learner in (0, 1):
        desk.mark(learner)
    desk.taker.take(desk.inbox.get(timeout=PATIENCE))
    until(lambda: held() is None, "the end of the copy")
    assert desk.taker.nearly_complete


def test_of_one_that_a_full_disk_keeps_from_being_completed_nothing_stays_but_its_number(desk, monkeypatch):
    def refused(path, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    desk.begin()
    for learner in (0, 1):
        desk.mark(learner)
        desk.write(learner)
    written = desk.inbox.get(timeout=PATIENCE)
    monkeypatch.setattr(array_file, "replace", refused)
    desk.taker.take(written)
    desk.settle()
    assert desk.noted[0][0] == "snapshot_given_up"
    assert {path.name for path in desk.folder.rglob("*")} == {"staging", "000001"}
    assert desk.taker.epoch == 1


@pytest.mark.parametrize("marked", [False, True])
def test_a_learner_that_is_lost_before_its_part_is_written_is_left_out(desk, marked):
    desk.begin()
    if marked:
        desk.mark(1)
    desk.taker.heard(events.LearnerLost(1, 1, "killed"))
    desk.mark(0)
    desk.write(0)
    desk.settle()
    assert desk.noted[0][1]["absent"] == [1]
    assert set(desk.newest().parts) == {SYNCER_PART, "learner_000"}


def test_a_learner_that_leaves_by_itself_before_its_part_is_written_gives_the_snapshot_up(desk):
    """As when a run is stopped: resumed from a snapshot without learners, it would lose what they held."""
    desk.begin()
    desk.mark(0)
    desk.taker.heard(events.LearnerLost(1, 0, events.LEFT))  # of an earlier incarnation
    assert not desk.noted
    desk.taker.heard(events.LearnerLost(1, 1, events.LEFT))
    [(name, values)] = desk.noted
    assert (name, values["reason"]) == ("snapshot_given_up", "learner 1 left before its part was written")
    assert desk.newest() is None


def test_learners_with_nothing_to_record_are_left_out(desk):
    desk.begin()
    for learner in (0, 1):
        desk.taker.take(StateRecorded(learner, 1, 1, None))
    desk.settle()
    assert desk.noted[0][1]["absent"] == [0, 1]


def test_a_silent_learner_is_left_out(desk):
    desk.begin()
    desk.taker.silent(0)
    desk.mark(1)
    desk.write(1)
    desk.settle()
    assert desk.noted[0][1]["absent"] == [0]


@pytest.mark.parametrize("marked", [False, True])
def test_one_of_which_all_learners_are_lost_is_given_up(desk, marked):
    """As when all connections break at once: resumed from it, the run would lose what learners held."""
    desk.begin()
    if marked:
        desk.mark(0)
    for learner in (0, 1):
        desk.taker.heard(events.LearnerLost(learner, 1, "its connection broke"))
    assert desk.noted == [("snapshot_given_up", {"number": 1, "step": 0, "reason": "all learners were lost"})]
    assert desk.newest() is None


def test_a_part_that_cannot_be_written_gives_the_snapshot_up_with_an_alarm(desk):
    desk.begin()
    desk.mark(0)
    desk.taker.take(PartWritten(0, 1, None, "/disk/learner_000: cannot be written: No space left on device"))
    [(name, values)] = desk.noted
    assert name == "snapshot_given_up"
    assert values["number"] == 1
    [alarm] = desk.alarms
    assert "No space left on device (learner 0): a snapshot is given up" in alarm
    assert desk.newest() is None


def test_one_of_many_bytes_may_take_longer(tmp_path):
    desk = Desk(tmp_path, patience=lambda learners: 5.0 + 2.0 * learners)
    desk.begin()
    assert desk.taker.next_deadline() == 9.0
    desk.taker.timeout(9.0)
    assert desk.noted[0][1]["reason"].startswith("after 9 s: ")


def test_one_waits_for_the_steps_at_whose_end_the_slowest_learner_sees_the_mark(tmp_path):
    """A learner handles what arrives only between two steps, which may each be longer than the timeout."""
    desk = Desk(tmp_path, timeout=5.0, steps_in_flight=2)
    for learner, step, now in ((0, 1, 10.0), (1, 1, 20.0), (0, 2, 30.0), (1, 2, 60.0)):
        desk.core.handle(report(learner, step), now)
    desk.begin()
    assert desk.taker.next_deadline() == 5.0 + 3 * 40.0
    for learner in (0, 1):
        desk.mark(learner)
        desk.write(learner)
    desk.settle()
    assert desk.noted[0][1]["learners"] == [0, 1] and not desk.alarms
    desk.taker.close(PATIENCE)


def test_one_that_takes_too_long_is_given_up_and_the_next_takes_another_number(tmp_path):
    desk = Desk(tmp_path, timeout=5.0)
    desk.begin()
    desk.mark(0)
    assert desk.taker.next_deadline() == 5.0
    desk.taker.timeout(4.0)
    assert not desk.noted
    desk.taker.timeout(5.0)
    told = "not all parts came within snapshot.timeout (learner 0, 1)"
    assert desk.noted[0][1]["reason"] == f"after 5 s: {told}"
    assert desk.alarms == [f"{tmp_path}: {told}: a snapshot is given up; training goes on"]
    assert desk.taker.next_deadline() is None
    desk.mark(1)  # too late
    assert desk.begin().number == 2
    desk.taker.close(PATIENCE)


def test_none_is_wanted_while_the_part_of_one_that_took_too_long_is_still_being_written(
    tmp_path, monkeypatch
):
    """Each holds a copy of all fragments, and a disk this slow would let them pile up."""
    desk, go_on, real = Desk(tmp_path, timeout=5.0), threading.Event(), parts.write_part

    def slowly(*given):
        assert go_on.wait(PATIENCE)
        return real(*given)

    monkeypatch.setattr(parts, "write_part", slowly)
    assert desk.taker.wanted(4)
    desk.begin()
    for learner in (0, 1):
        desk.mark(learner)
    desk.taker.timeout(5.0)
    assert not desk.taker.wanted(8)
    go_on.set()
    desk.taker.take(desk.inbox.get(timeout=PATIENCE))
    assert desk.taker.wanted(9)
    desk.taker.close(PATIENCE)


def test_a_disk_that_hangs_as_it_completes_one_is_told_and_may_yet_do_it(tmp_path, monkeypatch):
    desk, go_on, real = Desk(tmp_path, timeout=5.0), threading.Event(), SnapshotStore.complete

    def slowly(*given):
        assert go_on.wait(PATIENCE)
        return real(*given)

    monkeypatch.setattr(SnapshotStore, "complete", slowly)
    desk.begin()
    for learner in (0, 1):
        desk.mark(learner)
        desk.write(learner)
    desk.taker.take(desk.inbox.get(timeout=PATIENCE))
    assert desk.taker.next_deadline() == 5.0
    desk.taker.timeout(5.0)
    assert desk.alarms == [f"{tmp_path}: snapshot 1 is not completed, and none is taken meanwhile"]
    assert desk.taker.next_deadline() is None and not desk.taker.wanted(8)
    go_on.set()
    desk.settle()
    assert desk.newest().name.number == 1 and desk.taker.wanted(8)
    desk.taker.close(PATIENCE)


def test_a_folder_that_was_emptied_gives_no_number_that_learners_have_seen(tmp_path):
    """Whoever lived on has recorded its state for so many, and would answer none of them again."""
    desk = Desk(tmp_path)
    state = desk.core.state().with_version(RoundId(40, 0), 7, 1)
    desk.core = SyncerCore(desk.core.policy, state=state)
    assert desk.taker.begin(desk.core, [FragmentState(7, (), ())], 0.0).number == 10
    desk.taker.close(PATIENCE)


def test_a_folder_that_cannot_be_written_to_costs_the_snapshot_and_no_more(tmp_path):
    (tmp_path / "snapshots").write_text("a file where a folder must be")
    desk = Desk(tmp_path / "snapshots")
    assert desk.begin() is None
    assert [name for name, _ in desk.noted] == ["snapshot_given_up"]
    assert len(desk.alarms) == 1
    desk.taker.close(PATIENCE)


def test_states_that_are_no_cut_are_never_completed(desk):
    desk.core.handle(report(0, 3), 1.0)
    desk.begin()
    desk.mark(0, step=2)  # the syncer has heard of a step that the learner has yet to take
    assert desk.noted[0][1]["reason"] == "what it recorded is no consistent cut (learner 0)"
    assert desk.newest() is None


def no_room(desk, number):
    desk.taker.take(PartWritten(1, number, None, "/disk/learner_001: cannot be written: No space left"))


def of_versions_that_there_never_were(desk, number):
    desk.taker.take(StateRecorded(1, 1, number, 1 << 52, (1 << 52,)))


def nothing_was_written(desk, number):
    desk.taker.take(PartWritten(1, number, PartFiles({"state.json": (9, "a" * 64)})))


def of_another_size(desk, number):
    part = SnapshotPart({"params/w": np.ones(2, np.float32)}, {"learner": 1})
    files = desk.taker.writer.write(number, learner_part(1), part).result(PATIENCE)
    larger = {path: (size + 1, digest) for path, (size, digest) in files.files.items()}
    desk.taker.take(PartWritten(1, number, PartFiles(larger)))


def leaves(desk, number):
    desk.taker.heard(events.LearnerLost(1, 1, events.LEFT))


def says_nothing(desk, number):
    desk.taker.timeout(1e9)


@pytest.mark.parametrize(
    "spoil",
    [no_room, of_versions_that_there_never_were, nothing_was_written, of_another_size, leaves, says_nothing],
)
def test_a_learner_for_which_one_failed_is_left_out_of_the_next(desk, spoil):
    desk.begin()
    desk.mark(0)
    if spoil not in (of_versions_that_there_never_were, leaves, says_nothing):
        desk.mark(1)
    desk.write(0)
    spoil(desk, 1)
    while not desk.noted:
        desk.taker.take(desk.inbox.get(timeout=PATIENCE))
    [(name, values)] = desk.noted
    assert name == "snapshot_given_up" and "learner" in values["reason"] and "1" in values["reason"]
    desk.records.clear()
    assert desk.begin().learners == (0,)
    desk.mark(1, number=2)  # it records all the same, since it sees the number
    if spoil is not says_nothing:
        spoil(desk, 2)
    desk.mark(0, number=2)
    desk.write(0, number=2)
    desk.settle()
    [(name, values)] = desk.noted
    assert (name, values["learners"], values["absent"]) == ("snapshot", [0], [1])
    assert set(desk.newest().parts) == {SYNCER_PART, "learner_000"}
    assert desk.begin().learners == (0, 1), "it may take part again"


def test_learners_are_left_out_only_while_most_are_not(desk):
    desk.begin()
    desk.taker.timeout(1e9)
    assert desk.begin().learners == (0, 1)


def test_a_second_syncer_takes_a_number_above_one_that_was_begun(desk):
    desk.begin()
    after_a_crash = Desk(desk.folder)
    assert after_a_crash.begin().number == 2
    after_a_crash.taker.close(PATIENCE)


def test_the_end_of_the_run_gives_up_what_is_under_way(tmp_path, monkeypatch):
    desk = Desk(tmp_path, patience=lambda learners: 20.0 + learners)
    monkeypatch.setattr(time, "monotonic", lambda: 15.0)
    assert desk.taker.seconds_left() == 0.0
    desk.begin()
    assert desk.taker.seconds_left() == 7.0
    assert not desk.taker.nearly_complete
    monkeypatch.undo()
    desk.taker.close(PATIENCE)
    assert desk.taker.seconds_left() == 0.0
    assert desk.noted[0][1]["reason"] == "the run is over"


def test_threads_that_write_at_once_get_their_own_parts(desk):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parts = [SnapshotPart({"x": np.full(4, m, np.float32)}, {"learner": m}) for m in range(4)]
        futures = pool.map(lambda m: desk.taker.writer.write(9, learner_part(m), parts[m]), range(4))
        files = [future.result(PATIENCE) for future in futures]
    folder = parts_folder(desk.folder) / "000009"
    assert [read_part(folder / learner_part(m), files[m]).arrays["x"][0] for m in range(4)] == [0, 1, 2, 3]
