"""The syncer's state on disk: to the bit what was committed, whatever the disk does and whenever it stops."""

import errno
import os
import threading

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment, zeros
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.estimates import OfferDelay
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.state import SyncerState
from ddiloco.storage import array_file, checksummed_json
from ddiloco.storage.durable import DurableState, DurableStateError
from ddiloco.storage.run_mark import FRAGMENT, RunMarkError, begun
from ddiloco.telemetry import records
from ddiloco.telemetry.alarms import Alarms
from tests.refusals import refusal

THETA = {
    "layers/0/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers/1/kernel": np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5),
}
LAYOUT = fragment({name: tensor.shape for name, tensor in THETA.items()}, 2)
CONFIG = OuterConfig(merge="direct", optimizer="nesterov")


def model():
    return GlobalModel(LAYOUT, THETA, CONFIG, num_learners=1)


def merge(global_model, p, value):
    pieces = [np.full(shape, value, np.float32) for shape in LAYOUT.piece_shapes(p)]
    global_model.merge(p, [global_model.read(p, pieces)], [(2, 10)])


class Disk:
    """A DurableState with what it recorded."""

    def __init__(self, folder, layout=LAYOUT):
        self.taken, self.stop = [], threading.Event()
        self.state = DurableState(folder / "syncer", layout, self.taken.append, self.stop)
        self.folder = folder / "syncer"

    @property
    def alarms(self):
        return [record.sentence for record in self.taken if isinstance(record, records.Alarm)]


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


def test_what_was_committed_is_there_to_the_bit_with_the_optimizer_s_state(disk):
    trained, again = model(), model()
    assert disk.state.throughput.timeout(60.0, 10**15) == 60.0
    disk.state.begin(trained)
    assert disk.state.throughput.timeout(60.0, 10**15) > 120.0, "a million gigabytes take longer"
    for step, (p, value) in enumerate([(0, 0.5), (1, -1.0), (0, 2.0)], start=1):
        merge(trained, p, value)
        assert disk.state.commit(RoundId(step, p), trained)
    disk.state.remember([(0, 1), (1, 1001)])
    own = disk.state.lineage
    assert disk.state.restore(again) == SyncerState((2, 1), (3, 2), ((0, 1), (1, 1001)), (own, own))
    assert disk.state.state() == disk.state.restore(again)
    assert again.sha256() == trained.sha256()
    merge(trained, 0, 7.0)
    merge(again, 0, 7.0)
    assert again.sha256() == trained.sha256(), "momentum went on where it was"


def test_how_late_offers_are_is_durable_as_of_the_newest_round(disk):
    trained, old, new = model(), OfferDelay(1.0, 0.5, 2.0), OfferDelay(3.0, 0.25, 4.0)
    disk.state.begin(trained)
    for step, (p, delays) in enumerate([(1, {0: old, 1: old}), (0, {0: new})], start=1):
        merge(trained, p, 1.0)
        disk.state.commit(RoundId(step, p), trained, delays=delays)
    assert disk.state.state().delays == disk.state.restore(model()).delays == {0: new, 1: old}


def test_a_run_that_has_merged_nothing_goes_on_from_its_beginning(disk):
    disk.state.begin(model())
    again = GlobalModel(LAYOUT, zeros(LAYOUT), CONFIG, 1)
    assert disk.state.restore(again) == SyncerState.initial(2)
    assert again.sha256() == model().sha256()


def test_a_part_loads_its_own_fragments_whatever_has_become_of_the_others(disk):
    trained = model()
    disk.state.begin(trained)
    merge(trained, 1, 2.0)
    assert disk.state.commit(RoundId(3, 1), trained)
    (disk.folder / "fragment-0000").unlink()
    own = GlobalModel(LAYOUT, zeros(LAYOUT), CONFIG, 1, fragments=(1,))
    state = disk.state.restore(own)
    assert (state.versions, state.merged_steps) == ((0, 1), (0, 3))
    np.testing.assert_array_equal(own.fragment(1)[1][0], trained.fragment(1)[1][0])
    with pytest.raises(DurableStateError, match=r"fragment-0000: is missing"):
        disk.state.restore(GlobalModel(LAYOUT, zeros(LAYOUT), CONFIG, 1))


@pytest.mark.parametrize("kept", [0, 1, 30, -1])
def test_a_torn_file_is_found(disk, kept):
    disk.state.begin(model())
    path = disk.folder / "fragment-0000"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DurableStateError, match=r"fragment-0000: is damaged"):
        disk.state.restore(model())
    if kept >= 0:
        with pytest.raises(DurableStateError, match=r"fragment-0000: is damaged"):
            disk.state.state()


def test_what_is_known_of_fragments_is_told_by_their_headers_and_damage_by_who_uses_them(disk):
    """An authority whose parts merge has no use for the arrays, which may be hundreds of gigabytes."""
    trained = model()
    disk.state.begin(trained)
    merge(trained, 1, 2.0)
    assert disk.state.commit(RoundId(3, 1), trained)
    known, path = disk.state.state(), disk.folder / "fragment-0001"
    sound = path.read_bytes()
    path.write_bytes(sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:])
    assert disk.state.state() == known
    with pytest.raises(DurableStateError, match=r"fragment-0001: is damaged"):
        disk.state.fragment(1)
    at = sound.index(b'"version"')
    for damaged in (b'"Version"', b'\x00version"'):
        path.write_bytes(sound[:at] + damaged + sound[at + len(damaged) :])
        with pytest.raises(DurableStateError, match=r"fragment-0001: is damaged: its header"):
            disk.state.state()


@pytest.mark.parametrize(("where", "name"), [(0, "layers/0/kernel"), (-1, "array 1 of the outer optimizer")])
def test_a_fragment_that_is_not_finite_is_refused_and_what_of_it_is_named(where, name, disk):
    disk.state.begin(model())
    path = disk.folder / "fragment-0001"
    header, arrays = array_file.load(path, FRAGMENT)
    arrays = [np.array(array) for array in arrays]
    arrays[where].reshape(-1)[0] = np.inf
    array_file.save(path, FRAGMENT, header, arrays)
    told = f"{path}: {name} holds numbers that are not finite"
    assert refusal(DurableStateError, disk.state.restore, model()) == told
    disk.state.fragment(0)


def test_a_missing_fragment_or_one_of_another_model_is_refused(disk, tmp_path):
    disk.state.begin(model())
    other = fragment({name: tensor.T.shape for name, tensor in THETA.items()}, 2)
    with pytest.raises(DurableStateError, match="of another fragment or another model"):
        Disk(tmp_path, other).state.state()
    (disk.folder / "fragment-0000").unlink()
    with pytest.raises(DurableStateError, match=r"fragment-0000: is missing"):
        disk.state.state()


def test_incarnations_of_which_any_byte_is_damaged_are_refused(disk):
    disk.state.begin(model())
    disk.state.remember([(0, 7), (1, 1001)])
    path = disk.folder / "incarnations.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        for bit in range(8):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
            try:
                assert disk.state.state().incarnations == ((0, 7), (1, 1001)), "a space became another"
            except DurableStateError as error:
                assert "incarnations.json: is damaged" in str(error)
    known = sound.index(b"\n") + 1
    for end in range(known, len(sound)):  # a crash while they were added
        path.write_bytes(sound[:end])
        assert disk.state.state().incarnations == (((0, 7), (1, 1001)) if end == len(sound) - 1 else ())
    for torn in (b"", b"[[0,", b"[" * 3000, b"{}", sound[:9], sound[1:]):
        path.write_bytes(torn)
        with pytest.raises(DurableStateError, match=r"incarnations.json: is damaged"):
            disk.state.state()
    path.unlink()
    with pytest.raises(DurableStateError, match=r"incarnations.json: cannot be read"):
        disk.state.state()


def full(monkeypatch, times):
    """The next `times` syncs find the disk full; returns how many were tried."""
    tried, sync = [], os.fsync

    def refuse(descriptor):
        tried.append(descriptor)
        if len(tried) <= times:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    return tried


def test_on_a_full_disk_a_commit_waits_with_an_alarm_and_then_loses_nothing(disk, monkeypatch):
    monkeypatch.setattr("ddiloco.storage.durable.RETRY_SECONDS", 0.0)
    trained = model()
    disk.state.begin(trained)
    before = disk.state.state()
    merge(trained, 0, 3.0)
    looked = []
    record = disk.state._record

    def look(taken):
        looked.append(disk.state.state() == before)
        record(taken)

    disk.state._record = look
    full(monkeypatch, times=3)
    assert disk.state.commit(RoundId(4, 0), trained)
    assert looked == [True] * 3, "while it waits, the old state stands"
    assert set(disk.alarms) == {
        f"{disk.folder}: No space left on device: merges wait until version 1 of fragment 0 can be written"
    }
    state = disk.state.state()
    assert (state.versions, state.merged_steps) == ((1, 0), (4, 0))


def test_a_disk_that_is_full_again_later_is_told_again(disk, monkeypatch):
    monkeypatch.setattr("ddiloco.storage.durable.RETRY_SECONDS", 0.0)
    trained, shown = model(), []
    disk.state.begin(trained)
    for step in (4, 8):
        merge(trained, 0, 3.0)
        with monkeypatch.context() as filled:
            full(filled, times=2)
            assert disk.state.commit(RoundId(step, 0), trained)
    alarms = Alarms(shown.append)  # as the monitor keeps and shows them
    for sentence in disk.alarms:
        alarms.raise_once(sentence, sentence)
    assert len(shown) == 2


def test_a_run_that_ends_while_the_disk_is_full_gives_the_commit_up(disk, monkeypatch):
    trained = model()
    disk.state.begin(trained)
    merge(trained, 0, 3.0)
    disk.stop.set()
    full(monkeypatch, times=1000)
    assert not disk.state.commit(RoundId(4, 0), trained)
    assert disk.state.state() == SyncerState.initial(2)


def test_a_part_of_before_another_start_writes_nothing_into_the_new_folder(disk, tmp_path):
    """It may be in a merge that hangs, on a machine of its own, while the run is started again."""
    disk.state.begin(theirs := model())
    part = Disk(tmp_path)
    part.state.restore(theirs)
    for _ in range(9):
        merge(theirs, 1, 0.5)
    disk.folder.rename(tmp_path / "previous")
    again = Disk(tmp_path)
    again.state.begin(model())
    assert not part.state.commit(RoundId(99, 1), theirs)
    assert [alarm.partition(": ")[2] for alarm in part.alarms] == [
        "the run was started again: version 9 of fragment 1 is not written"
    ]
    assert again.state.state().versions == (0, 0)


def test_a_refused_incarnation_is_told_and_stops_nobody(disk, monkeypatch):
    disk.state.begin(model())
    full(monkeypatch, times=1)
    disk.state.remember([(0, 5)])
    assert disk.alarms == [f"{disk.folder}: No space left on device: incarnations are not durable"]
    disk.state.remember([(0, 5), (1, 1)])
    assert disk.state.state().incarnations == ((0, 5), (1, 1))


def test_a_join_adds_to_the_incarnations_and_rewrites_them_seldom(disk, monkeypatch):
    disk.state.begin(model())
    written, save = [], checksummed_json.save
    monkeypatch.setattr(
        checksummed_json, "save", lambda path, values: (written.append(len(values)), save(path, values))
    )
    for learner in range(1000):
        assert disk.state.remember([(learner, 7)])
    assert sum(written) < 3000
    assert disk.state.state().incarnations == tuple((learner, 7) for learner in range(1000))


def test_who_joins_after_a_version_was_pinned_is_not_in_it(disk, tmp_path):
    disk.state.begin(model())
    disk.state.complete()
    disk.state.remember([(0, 7)])
    disk.state.pin([0, 1], tmp_path / "pinned" / "syncer")
    disk.state.remember([(1, 8)])
    assert checksummed_json.load(tmp_path / "pinned" / "syncer" / "incarnations.json") == {"0": 7}
    assert disk.state.state().incarnations == ((0, 7), (1, 8))


def test_two_writers_of_one_file_never_leave_a_mixture(tmp_path):
    path, damaged, stop = tmp_path / "file", [], threading.Event()
    array_file.save(path, b"test\n", {}, [np.zeros(1 << 16)])

    def write(value):
        while not stop.is_set():
            array_file.save(path, b"test\n", {"value": value}, [np.full(1 << 16, value)])

    writers = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    for _ in range(200):
        try:
            header, [found] = array_file.load(path, b"test\n")
            assert (found == header.get("value", 0.0)).all()
        except (ValueError, AssertionError) as error:
            damaged.append(error)
    stop.set()
    for writer in writers:
        writer.join()
    assert not damaged
    assert [left.name for left in tmp_path.iterdir()] == ["file"]


def test_files_of_two_runs_are_not_taken_for_one(disk):
    disk.state.run = "one"
    disk.state.begin(model())
    sound = (disk.folder / "fragment-0001").read_bytes()
    disk.state.run = "other"
    disk.state.begin(model())
    disk.state.state()
    (disk.folder / "fragment-0001").write_bytes(sound)
    with pytest.raises(DurableStateError, match=r"fragment-0001: is of another run"):
        disk.state.state()


def test_a_start_is_complete_only_once_it_is_marked_and_a_damaged_mark_is_named(disk):
    disk.state.run = "one"
    disk.state.begin(model())
    assert begun(disk.folder) is None
    disk.state.complete()
    assert begun(disk.folder).run == "one"
    (disk.folder / "run.json").write_text("[")
    with pytest.raises(RunMarkError, match=r"run.json: cannot be used"):
        begun(disk.folder)


def test_who_looks_for_a_run_while_its_first_start_writes_reads_no_arrays(disk, monkeypatch):
    """An evaluator looks five times a second, and the first fragments of a large model are all of it."""
    disk.state.begin(model())
    with monkeypatch.context() as reading:
        reading.setattr(array_file, "load", lambda path, magic: pytest.fail(f"{path} is read whole"))
        assert begun(disk.folder) is None


@pytest.mark.parametrize("header", ["[]", "{}"])
def test_a_fragment_whose_header_is_none_does_not_hide_the_run_of_the_others(header, disk):
    trained = model()
    disk.state.run = "one"
    disk.state.begin(trained)
    merge(trained, 1, 3)
    disk.state.commit(RoundId(4, 1), trained)
    damaged = disk.folder / "fragment-0000"
    data = damaged.read_bytes()
    at = data.index(b"{")
    damaged.write_bytes(data[: at - 8] + len(header).to_bytes(8, "little") + header.encode())
    assert begun(disk.folder).run == "one"


@pytest.mark.parametrize("links", [True, False])
def test_pinned_versions_stay_what_they_were(links, disk, tmp_path, monkeypatch):
    disk.state.begin(trained := model())
    disk.state.remember(((0, 7),))
    merge(trained, 0, 3.0)
    assert disk.state.commit(RoundId(4, 0), trained)
    if not links:

        def refused(*paths):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)
    assert disk.state.pin(range(2), tmp_path / "pinned") == 4
    then = model()
    merge(trained, 0, 5.0)
    assert disk.state.commit(RoundId(8, 0), trained)
    pinned = DurableState(tmp_path / "pinned", LAYOUT, print, threading.Event(), disk.state.run)
    state = pinned.restore(then)
    assert (state.versions, state.merged_steps, state.incarnations) == ((1, 0), (4, 0), ((0, 7),))
    assert begun(tmp_path / "pinned").run == disk.state.run


@pytest.mark.parametrize(("wanted", "pinned"), [((2, 0), 2), ((3, 0), 3), ((1, 0), 3), ((1 << 52, 0), 3)])
def test_of_versions_that_are_kept_the_wanted_one_is_pinned_else_the_newest(wanted, pinned, tmp_path):
    state = DurableState(tmp_path / "syncer", LAYOUT, print, threading.Event(), "run", keep=2)
    state.begin(trained := model())
    for n in (1, 2, 3):
        merge(trained, 0, float(n))
        assert state.commit(RoundId(4 * n, 0), trained)
    assert state.pin(range(2), tmp_path / "pinned", wanted) == 4 * pinned
    again = DurableState(tmp_path / "pinned", LAYOUT, print, threading.Event(), "run")
    assert again.state().versions == (pinned, 0)


def test_versions_that_another_process_commits_are_awaited_until_the_disk_shows_them(tmp_path):
    class Waits(threading.Event):
        def wait(self, timeout=None):
            merge(trained, 0, 3.0)
            return not other.commit(RoundId(4, 0), trained)

    trained, other = model(), DurableState(tmp_path / "syncer", LAYOUT, print, threading.Event(), "run")
    other.begin(trained)
    state = DurableState(tmp_path / "syncer", LAYOUT, print, Waits(), "run")
    state.await_shown([0, 1], (2, 0))
    assert state.state().versions == (2, 0)
