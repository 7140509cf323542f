"""The global model of a run: its checkpoint, or what its syncer made durable where there is none."""

import json
import threading

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import take
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.messages import RoundId
from ddiloco.run.recipes import assembly_of
from ddiloco.run.saved_model import saved_model
from ddiloco.settings.experiment import to_json
from ddiloco.storage import checkpoints
from ddiloco.storage.durable import DurableState
from tests.workbench import assert_equal, experiment


@pytest.fixture
def run(tmp_path, data_dir):
    """The workdir of a run that its syncer has begun, its settings and its parameters."""
    e = experiment(data_dir)
    assembly = assembly_of(e)
    params = assembly.initial_parameters()
    (tmp_path / "config.json").write_text(json.dumps(to_json(e)))
    durable = DurableState(tmp_path / "syncer", assembly.layout, print, threading.Event(), run="1")
    durable.begin(GlobalModel(assembly.layout, params, e.outer, 2))
    durable.complete()
    return tmp_path, e, params


def test_of_a_run_that_left_no_checkpoint_it_is_what_was_durable(run):
    workdir, e, params = run
    found = saved_model(workdir)
    assert (found.experiment, found.step) == (e, 0)
    assert_equal(found.params, params)


def test_a_folder_without_a_checkpoint_as_a_full_disk_leaves_it_hides_nothing(run):
    workdir, _, params = run
    (workdir / "checkpoints").mkdir()
    assert_equal(saved_model(workdir).params, params)


def test_of_a_run_that_went_on_after_it_was_interrupted_it_is_the_later_of_both(run):
    workdir, e, params = run
    others = {name: np.asarray(value) + 1 for name, value in params.items()}
    checkpoints.save(workdir / "checkpoints", 5, e, others, None)
    layout = assembly_of(e).layout
    durable = DurableState(workdir / "syncer", layout, print, threading.Event(), run="1")
    model = GlobalModel(layout, params, e.outer, 2)
    model.merge(0, [model.read(0, take(layout, 0, params))], [(1, 10)])
    durable.commit(RoundId(9, 0), model)
    assert saved_model(workdir).step == 9
    (workdir / "syncer" / "fragment-0001").write_bytes(b"damaged")
    assert saved_model(workdir).step == 5


def test_a_checkpoint_comes_first(run):
    workdir, e, params = run
    others = {name: np.asarray(value) + 1 for name, value in params.items()}
    checkpoints.save(workdir / "checkpoints", 12, e, others, None)
    found = saved_model(workdir)
    assert found.step == 12
    assert_equal(found.params, others)


def test_where_nothing_was_left_that_is_told(run, tmp_path):
    with pytest.raises(ConfigError, match=r"workdir: .*: no such folder of checkpoints"):
        saved_model(tmp_path / "elsewhere")
    for path in (tmp_path / "syncer").glob("*0*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"workdir: .*is missing"):
        saved_model(tmp_path)
