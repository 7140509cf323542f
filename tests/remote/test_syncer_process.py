"""How a syncer's process begins, and how it leaves."""

import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.disk.run_mark import begun
from ddiloco.observe.files import write_json
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
        outcomes.append(run_syncer(assembly, Taken().append, stop, None, alone=alone, **where))
        write_json(tmp_path / "summary.json", {"step": step})
    assert [outcome.finished for outcome in outcomes] == [False, not drained]


def test_a_disk_that_is_full_at_the_first_start_is_told_in_one_line(data_dir, tmp_path):
    assembly = assembly_of(experiment(data_dir, driver="remote"))
    listening = Listening("127.0.0.1:0", Security(), assembly.experiment.remote, 2)
    where = {"listening": listening, "security": Security()}
    with small_disk(tmp_path / "disk", "64k") as workdir:
        where["folder"] = workdir / "syncer"
        told = refusal(ConfigError, run_syncer, assembly, pytest.fail, threading.Event(), None, **where)
        assert begun(workdir / "syncer") is None
    assert told == f"workdir: {workdir}: cannot be written to: No space left on device"
