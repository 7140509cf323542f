"""How a syncer's process begins, and how it leaves."""

import threading
import time
import types

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import FragmentState
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.process import SyncerRun, run_syncer
from ddiloco.remote.wire.security import Security
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.run_mark import begun
from ddiloco.storage.shard_states import ShardState
from ddiloco.telemetry.files import write_json
from tests.refusals import refusal
from tests.remote.ends import Taken
from tests.small_disks import small_disk
from tests.workbench import experiment


def test_a_syncer_that_leaves_its_run_to_another_does_not_score(data_dir, tmp_path):
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    stop = threading.Event()
    stop.set()
    for comes_back in (True, False):
        listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
        where = {"listening": listening, "security": Security(), "folder": tmp_path / "syncer"}
        told = {**where, "comes_back": lambda comes_back=comes_back: comes_back}
        outcome = run_syncer(assembly, Taken().append, stop, **told)
        assert (outcome.eval_loss is None) is comes_back


@pytest.mark.parametrize("drained", [True, False])
def test_a_run_whose_learners_have_left_is_finished_if_one_came_to_the_last_step(data_dir, tmp_path, drained):
    """The syncer died after that, and another one saves what was merged."""
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    step = assembly.experiment.train.steps - drained
    outcomes = []
    for alone in (False, True):
        stop = threading.Event()
        stop.set()
        listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
        where = {"listening": listening, "security": Security(), "folder": tmp_path / "syncer"}
        outcomes.append(run_syncer(assembly, Taken().append, stop, alone=alone, **where))
        write_json(tmp_path / "summary.json", {"step": step})
    assert [outcome.finished for outcome in outcomes] == [False, not drained]


def test_a_disk_that_is_full_at_the_first_start_is_told_in_one_line(data_dir, tmp_path):
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
    where = {"listening": listening, "security": Security()}
    with small_disk(tmp_path / "disk", "64k") as workdir:
        where["folder"] = workdir / "syncer"
        told = refusal(ConfigError, run_syncer, assembly, pytest.fail, threading.Event(), **where)
        assert begun(workdir / "syncer") is None
    assert told == f"workdir: {workdir}: cannot be written to: No space left on device"


@pytest.mark.parametrize("late", [2, 1000])
def test_the_model_of_shards_has_the_last_versions_as_soon_as_the_disk_shows_them(late, monkeypatch):
    """A shared disk may show for a minute what was there before; after that it is told."""
    shown, now, alarms = [], [0.0], []

    def fragment_of(p):
        shown.append(p)
        version = 6 if p == 1 and shown.count(1) <= late else 7
        return FragmentState(version, (np.full(2, version, np.float32),), ()), 28, 1

    run = SyncerRun.__new__(SyncerRun)
    run._record = alarms.append
    run._assembly = types.SimpleNamespace(layout=fragment({"a": (2,), "b": (2,)}, 2))
    run._durable = types.SimpleNamespace(fragment=fragment_of, state=lambda: None)
    run._syncer = types.SimpleNamespace(core=types.SimpleNamespace(versions=(7, 0)))
    ended = {1: ShardState("start", 2, "b:1", 28, True, (7,))}
    run._shards = types.SimpleNamespace(count=2, wait_for_others=lambda seconds: ended)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    found = sorted(float(array[0]) for array in run._result()[0].values())
    if late == 2:
        assert found == [7, 7] and now == [2.0] and not alarms
    else:
        assert found == [6, 7] and now == [90.0]
        assert [a.sentence for a in alarms] == [
            "the model has version 6 of fragment 1: the disk shows no later one"
        ]
