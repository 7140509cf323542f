"""A learner's copies of its inner optimizer state on disk."""

import queue

import numpy as np
import pytest

from ddiloco.remote.learner import inner_files
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.recovery import Checkpointer
from ddiloco.roles.exchange import InnerState
from tests.remote.donors import FORMAT, LEAVES, assert_same, state
from tests.remote.ends import PATIENCE, until


def test_a_copy_of_another_run_is_not_used(tmp_path):
    inner_files.save(tmp_path, FORMAT, state(1), run="one")
    with pytest.raises(inner_files.InnerFileError, match="is of another run"):
        inner_files.load(tmp_path, FORMAT, "other")
    assert_same(inner_files.load(tmp_path, FORMAT, "one"), state(1))


def test_a_copy_on_disk_is_the_newest_and_another_optimizer_s_is_refused(tmp_path):
    assert inner_files.load(tmp_path, FORMAT) is None
    inner_files.save(tmp_path, FORMAT, state(1))
    inner_files.save(tmp_path, FORMAT, newest := state(2, step=9))
    assert_same(inner_files.load(tmp_path, FORMAT), newest)
    with pytest.raises(inner_files.InnerFileError, match="another inner optimizer"):
        inner_files.load(tmp_path, InnerFormat(LEAVES[:2]))


def test_any_single_byte_that_changes_is_noticed(tmp_path):
    small = InnerFormat(LEAVES[:1])
    inner_files.save(tmp_path, small, InnerState(1, (0,), [np.int32(5)]))
    path = tmp_path / "inner_state"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(inner_files.InnerFileError):
            inner_files.load(tmp_path, small)


def test_the_checkpointer_asks_the_worker_and_writes_what_it_gets(tmp_path):
    inbox, told = queue.SimpleQueue(), []
    copies = Checkpointer(inbox, FORMAT, tmp_path, 0.01, told.append)
    copies.start()
    for value in (1, 2):
        wish = inbox.get(timeout=PATIENCE)
        assert wish.versions == ()
        wish.answer.set_result(state(value))
    inbox.get(timeout=PATIENCE)  # the second one is on the disk by now
    assert_same(inner_files.load(tmp_path, FORMAT), state(2))
    assert copies.stop(PATIENCE)
    assert not told


def test_where_there_is_no_copy_or_no_memory_to_write_one_the_next_is_kept(tmp_path, monkeypatch):
    inbox, told, save = queue.SimpleQueue(), [], inner_files.save

    def saved(folder, inner, given, run):
        if given.step == 2:
            raise MemoryError
        save(folder, inner, given, run)

    monkeypatch.setattr(inner_files, "save", saved)
    copies = Checkpointer(inbox, FORMAT, tmp_path, 0.01, told.append)
    copies.start()
    inbox.get(timeout=PATIENCE).answer.set_exception(MemoryError("no copy"))
    inbox.get(timeout=PATIENCE).answer.set_result(state(1, step=2))
    until(lambda: told, "the alarm")
    assert told[0].sentence == f"{tmp_path}: MemoryError: the inner optimizer state is not kept"
    inbox.get(timeout=PATIENCE).answer.set_result(state(1))
    inbox.get(timeout=PATIENCE)  # it is on the disk by now
    assert_same(inner_files.load(tmp_path, FORMAT), state(1))
    assert copies.stop(PATIENCE)


def test_a_folder_that_cannot_be_written_to_is_an_alarm(tmp_path):
    (tmp_path / "file").write_text("in the way")
    inbox, told = queue.SimpleQueue(), []
    copies = Checkpointer(inbox, FORMAT, tmp_path / "file", 0.01, told.append)
    copies.start()
    inbox.get(timeout=PATIENCE).answer.set_result(state(1))
    until(lambda: told, "the alarm")
    assert "is not kept" in told[0].sentence
    assert copies.stop(PATIENCE)
