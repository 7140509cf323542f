"""How a syncer's process begins where it cannot."""

import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.disk.run_mark import begun
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.process import run_syncer
from ddiloco.remote.wire.security import Security
from ddiloco.run.recipes import assembly_of
from tests.refusals import refusal
from tests.small_disks import small_disk
from tests.workbench import experiment


def test_a_disk_that_is_full_at_the_first_start_is_told_in_one_line(data_dir, tmp_path):
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
    where = {"listening": listening, "security": Security()}
    with small_disk(tmp_path / "disk", "64k") as workdir:
        where["folder"] = workdir / "syncer"
        told = refusal(ConfigError, run_syncer, assembly, pytest.fail, threading.Event(), None, **where)
        assert begun(workdir / "syncer") is None
    assert told == f"workdir: {workdir}: cannot be written to: No space left on device"
