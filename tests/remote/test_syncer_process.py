"""How a syncer's process begins, and how it leaves."""

import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.disk.run_mark import begun
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.process import run_syncer
from ddiloco.remote.wire.security import Security
from ddiloco.run.recipes import assembly_of
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
        outcome = run_syncer(assembly, Taken().append, stop, None, **told)
        assert (outcome.eval_loss is None) is comes_back


def test_a_disk_that_is_full_at_the_first_start_is_told_in_one_line(data_dir, tmp_path):
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
    where = {"listening": listening, "security": Security()}
    with small_disk(tmp_path / "disk", "64k") as workdir:
        where["folder"] = workdir / "syncer"
        told = refusal(ConfigError, run_syncer, assembly, pytest.fail, threading.Event(), None, **where)
        assert begun(workdir / "syncer") is None
    assert told == f"workdir: {workdir}: cannot be written to: No space left on device"
