"""Versions of the durable fragments that are kept beside the newest."""

import errno
import os
import threading

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.storage import array_file, fragment_history
from ddiloco.storage.durable import DurableState
from ddiloco.storage.run_mark import FRAGMENT
from ddiloco.telemetry import records

THETA = {f"layers/{i}/kernel": np.full((2, 3), i, np.float32) for i in range(2)}
LAYOUT = fragment({name: tensor.shape for name, tensor in THETA.items()}, 2)


def committed(folder, rounds, keep=3):
    """A run of one learner after these rounds (step, fragment); the model's hash after each, and records."""
    taken = []
    model = GlobalModel(LAYOUT, THETA, OuterConfig(optimizer="nesterov"), 1)
    durable = DurableState(folder, LAYOUT, taken.append, threading.Event(), keep=keep)
    durable.begin(model)
    hashes = [model.sha256()]
    for step, p in rounds:
        model.merge(p, [model.read(p, [np.full((2, 3), step, np.float32)])], [(2, 10)])
        durable.commit(RoundId(step, p), model, {0: Watermark(7, step, f"after {step}")})
        hashes.append(model.sha256())
    durable.remember([(0, 7)])
    return hashes, taken


ROUNDS = [(1, 0), (2, 1), (5, 0), (6, 1), (9, 0), (10, 1)]


def listed(folder):
    return {
        name: [(one.version, one.step) for one in of_it]
        for name, of_it in fragment_history.versions(folder).items()
    }


def test_a_version_that_is_damaged_is_not_gone_back_to(tmp_path):
    committed(tmp_path, ROUNDS)
    os.truncate(tmp_path / "fragment-0001", 100)  # which is the newest version that is kept, too
    assert [one.version for one in fragment_history.as_of(tmp_path, 10).values()] == [3, 2]
    for one in fragment_history.versions(tmp_path)["fragment-0001"]:
        os.truncate(one.path, 100)
    with pytest.raises(LookupError, match="all versions of fragment-0001 from before are damaged"):
        fragment_history.as_of(tmp_path, 10)


def test_a_version_that_is_not_finite_is_not_gone_back_to(tmp_path):
    committed(tmp_path, ROUNDS)
    newest = fragment_history.versions(tmp_path)["fragment-0001"][-1]
    header, arrays = array_file.load(newest.path, FRAGMENT)
    array_file.save(newest.path, FRAGMENT, header, [np.nan * arrays[0], *arrays[1:]])
    assert [one.version for one in fragment_history.as_of(tmp_path, 10).values()] == [3, 2]


def test_the_newest_versions_of_each_fragment_are_kept_and_no_more(tmp_path):
    committed(tmp_path, ROUNDS)
    assert listed(tmp_path) == {
        "fragment-0000": [(1, 1), (2, 5), (3, 9)],
        "fragment-0001": [(1, 2), (2, 6), (3, 10)],
    }
    assert [one.version for one in fragment_history.as_of(tmp_path, 6).values()] == [2, 2]
    assert [one.version for one in fragment_history.as_of(tmp_path, 5).values()] == [2, 1]
    with pytest.raises(LookupError, match="is 1, but versions of all fragments are kept from step 2 on"):
        fragment_history.as_of(tmp_path, 1)


def test_what_was_committed_by_a_syncer_that_was_killed_before_it_was_kept_is_kept_by_the_next(tmp_path):
    committed(tmp_path, ROUNDS)
    before = listed(tmp_path)
    for of_it in fragment_history.versions(tmp_path).values():
        of_it[-1].path.unlink()  # as it is between the two
    later = GlobalModel(LAYOUT, THETA, OuterConfig(optimizer="nesterov"), 1)
    DurableState(tmp_path, LAYOUT, print, threading.Event(), keep=3).restore(later)
    assert listed(tmp_path) == before
    assert [one.version for one in fragment_history.as_of(tmp_path, 10).values()] == [3, 3]


def test_a_version_that_is_kept_takes_no_room_until_it_is_replaced(tmp_path):
    committed(tmp_path, ROUNDS)
    newest = fragment_history.versions(tmp_path)["fragment-0000"][-1].path
    assert newest.samefile(tmp_path / "fragment-0000")
    assert len(list(tmp_path.glob("kept/*"))) == 6


def test_by_one_version_only_the_newest_is_meant(tmp_path):
    committed(tmp_path, ROUNDS, keep=1)
    assert not (tmp_path / "kept").exists()
    with pytest.raises(LookupError, match="has no versions to go back to"):
        fragment_history.as_of(tmp_path, 9)


def test_a_fragment_not_merged_since_versions_are_kept_is_told(tmp_path):
    committed(tmp_path, ROUNDS, keep=1)
    fragment_history.keep(tmp_path / "fragment-0001", 3, 10, most=3)
    with pytest.raises(LookupError, match="is 10, but of fragment-0000 no version is kept yet"):
        fragment_history.as_of(tmp_path, 10)


def test_a_disk_without_links_keeps_copies(tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    committed(tmp_path, ROUNDS)
    newest = fragment_history.versions(tmp_path)["fragment-0001"][-1].path
    assert newest.read_bytes() == (tmp_path / "fragment-0001").read_bytes()
    assert not newest.samefile(tmp_path / "fragment-0001")


def test_a_disk_that_keeps_nothing_raises_an_alarm_and_stops_no_commit(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "kept").write_text("a file where the folder should be")
    _, taken = committed(tmp_path, ROUNDS)
    alarms = {record.sentence for record in taken if isinstance(record, records.Alarm)}
    assert alarms == {f"{tmp_path}: File exists: earlier versions are not kept"}
    assert DurableState(tmp_path, LAYOUT, print, threading.Event()).state().versions == (3, 3)
