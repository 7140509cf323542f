"""Where a learner's own copies of its inner optimizer state are taken and written."""

import functools
import queue

from ddiloco.remote.learner.own_copies import OwnCopies
from ddiloco.remote.learner.recovery import Checkpointer
from tests.remote.donors import FORMAT, assert_same, state
from tests.remote.ends import PATIENCE, until


def checkpointer(inbox, folder, told):
    keep = functools.partial(OwnCopies(folder, FORMAT).keep, run="run")
    return Checkpointer(inbox, keep, folder, 0.01, told.append)


def test_the_checkpointer_asks_the_worker_and_writes_what_it_gets(tmp_path):
    inbox, told = queue.SimpleQueue(), []
    copies = checkpointer(inbox, tmp_path, told)
    copies.start()
    for value in (1, 2):
        wish = inbox.get(timeout=PATIENCE)
        assert wish.versions == ()
        wish.answer.set_result(state(value))
    inbox.get(timeout=PATIENCE)  # the second one is on the disk by now
    assert_same(OwnCopies(tmp_path, FORMAT).newest("run"), state(2))
    assert copies.stop(PATIENCE)
    assert not told


def test_where_there_is_no_copy_or_no_memory_to_write_one_the_next_is_kept(tmp_path, monkeypatch):
    inbox, told, keep = queue.SimpleQueue(), [], OwnCopies.keep

    def kept(self, given, run):
        if given.step == 2:
            raise MemoryError
        keep(self, given, run)

    monkeypatch.setattr(OwnCopies, "keep", kept)
    copies = checkpointer(inbox, tmp_path, told)
    copies.start()
    inbox.get(timeout=PATIENCE).answer.set_exception(MemoryError("no copy"))
    inbox.get(timeout=PATIENCE).answer.set_result(state(1, step=2))
    until(lambda: told, "the alarm")
    assert told[0].sentence == f"{tmp_path}: MemoryError: the inner optimizer state is not kept"
    inbox.get(timeout=PATIENCE).answer.set_result(state(1))
    inbox.get(timeout=PATIENCE)  # it is on the disk by now
    assert_same(OwnCopies(tmp_path, FORMAT).newest("run"), state(1))
    assert copies.stop(PATIENCE)


def test_a_folder_that_cannot_be_written_to_is_an_alarm(tmp_path):
    (tmp_path / "file").write_text("in the way")
    inbox, told = queue.SimpleQueue(), []
    copies = checkpointer(inbox, tmp_path / "file", told)
    copies.start()
    inbox.get(timeout=PATIENCE).answer.set_result(state(1))
    until(lambda: told, "the alarm")
    assert "is not kept" in told[0].sentence
    assert copies.stop(PATIENCE)
