"""What a run says of fragments that it never merges, and how it ends if its result finds no room."""

import contextlib
import json
import threading

import numpy as np
import pytest
import tokenizers

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.run import resources
from ddiloco.run.job import _write_settings, run_job
from ddiloco.run.recipes import ModelRecipe
from ddiloco.storage.run_mark import RunMark
from ddiloco.storage.workdir import owned
from ddiloco.telemetry.files import read_json
from ddiloco.training.parameters import sampled_parameters
from ddiloco.virtual.run import VirtualRun
from ddiloco.weights.export import export
from ddiloco.workers.run_result import Outcome
from tests import virtual_runs, workbench
from tests.refusals import refusal
from tests.small_disks import small_disk


def test_files_that_a_kill_has_left_unfinished_go_with_the_next_start_and_no_others(data_dir, tmp_path):
    left = [tmp_path / ".summary.json.1a2b3c4d.new", tmp_path / "evaluator" / ".wanted.json.1a2b3c4d.new"]
    own = tmp_path / ".notes.new"
    (tmp_path / "evaluator").mkdir()
    for path in (*left, own):
        path.touch()
    _write_settings(tmp_path, workbench.experiment(data_dir), resume=True)
    assert own.exists() and not any(path.exists() for path in left)


@pytest.mark.usefixtures("one_device")
def test_a_folder_that_another_run_has_is_told_before_data_are_looked_for(tmp_path):
    missing = workbench.experiment(str(tmp_path), data={"name": str(tmp_path / "no_such_file")})
    folder = tmp_path / "run"
    told = refusal(DataError, lambda: run_job(missing, folder, threading.Event()))
    assert told.startswith("config.data.name: ") and not folder.exists()
    with owned(folder):
        told = refusal(ConfigError, lambda: run_job(missing, folder, threading.Event()))
    assert told.startswith(f"workdir: {folder}: belongs to a run in progress, of process ")


class Began(Exception):
    """A runner was called."""


def started(experiment, workdir):
    """Starts a syncer as an engine does, each time with the same command."""

    def runner(*_):
        raise Began

    return run_job(experiment, workdir, threading.Event(), runner, resume=None)


@pytest.fixture
def begun(data_dir, tmp_path):
    """The settings of a run that has begun in `tmp_path`."""
    settings = workbench.experiment(data_dir, driver="remote")
    with pytest.raises(Began):
        started(settings, tmp_path)
    (tmp_path / "syncer").mkdir()
    RunMark("run", "start").save(tmp_path / "syncer")
    return settings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 9}, "config.seed: is 9, but must be 0 to resume: it orders the data"),
        (
            {"outer": {"optimizer": "direct"}},
            "config.outer.optimizer: is 'direct', but must be 'nesterov' to resume: ",
        ),
        ({"data": {"interleave": 3}}, "config.data.interleave: is 3, but must be 128 to resume"),
    ],
)
def test_a_run_does_not_go_on_with_settings_that_must_stay_and_nothing_is_touched(
    begun, changes, told, data_dir, tmp_path
):
    before = (tmp_path / "config.json").read_text()
    changed = workbench.experiment(data_dir, driver="remote", **changes)
    assert refusal(ConfigError, started, changed, tmp_path).startswith(told)
    assert (tmp_path / "config.json").read_text() == before
    with pytest.raises(Began):
        started(begun, tmp_path)


def test_a_run_goes_on_with_settings_that_may_change_and_after_its_settings_are_lost(
    begun, data_dir, tmp_path
):
    changed = workbench.experiment(data_dir, driver="remote", sync={"quorum": 1}, train={"steps": 99})
    for text in (None, "{torn", '{"model": {"of_another_version": 1}}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(Began):
            started(changed, tmp_path)


def test_the_first_start_of_an_engine_asks_for_the_memory_and_not_for_data_and_a_later_one_for_neither(
    data_dir, tmp_path, monkeypatch
):
    settings = workbench.experiment(data_dir, driver="remote")
    monkeypatch.setattr(ModelRecipe, "check_scoring", lambda recipe: pytest.fail("data are opened"))
    monkeypatch.setattr(resources, "host_memory", lambda: 1)
    told = refusal(ConfigError, started, settings, tmp_path)
    assert told.startswith("the syncer needs at least ")
    (tmp_path / "syncer").mkdir()
    RunMark("run", "start").save(tmp_path / "syncer")
    with pytest.raises(Began):
        started(settings, tmp_path)


# A save of Orbax's that failed calls its event loop once more, after it closed it.
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_a_result_that_finds_no_room_is_told_in_one_line_and_the_records_stay(data_dir, tmp_path):
    experiment = workbench.experiment(data_dir, driver="virtual", train={"steps": 4})
    with contextlib.ExitStack() as disks, workbench.devices(1):

        def runner(assembly, record, stop):
            disks.enter_context(small_disk(tmp_path / "checkpoints", "16k"))
            return VirtualRun(assembly, record, stop, tmp_path).run()

        result = run_job(experiment, tmp_path, threading.Event(), runner=runner)
    where = tmp_path / "checkpoints" / str(result.summary["step"])
    assert result.failure == f"{where}: cannot be written: No space left on device"
    assert read_json(tmp_path / "summary.json")["step"] == 4
    assert not result.summary["finished"], "who starts it again would not save it"


def test_a_run_shorter_than_the_interval_merges_every_fragment_at_its_end(data_dir, tmp_path):
    settings = {"virtual": {"arrays": False}, "train": {"steps": 3}}
    summary = virtual_runs.run_job(virtual_runs.virtual(data_dir, **settings), tmp_path).summary
    assert summary["alarms"] == []
    assert min(summary["outer_steps"].values()) >= 1


def spoiled_weights(experiment, folder):
    """Weights for the experiment in a folder, of which one number is none; their file."""
    params = {name: np.array(value) for name, value in sampled_parameters(experiment.model, 0)}
    params["final_norm/scale"][3] = np.nan
    export(experiment, params, folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("driver", ["local", "remote"])
def test_weights_that_are_not_finite_are_refused_before_anything_is_written(driver, data_dir, tmp_path):
    experiment = workbench.experiment(data_dir, driver=driver, init_from=str(tmp_path / "weights"))
    file = spoiled_weights(experiment, tmp_path / "weights")
    workdir = tmp_path / "run"
    with workbench.devices(2):
        told = refusal(ConfigError, run_job, experiment, workdir, threading.Event(), runner=lambda *_: None)
    assert told == f"config.init_from: {file}: model.norm.weight holds numbers that are not finite"
    assert not workdir.exists()


@pytest.mark.parametrize(("driver", "end"), [("local", "<end>"), ("remote", None)])
def test_a_run_whose_documents_have_no_end_says_so(driver, end, data_dir, tmp_path):
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    ids = {char: i for i, char in enumerate(sorted(level.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    data = {"tokenizer": "huggingface", "tokenizer_model": str(tmp_path / "tokenizer.json")}
    experiment = workbench.experiment(data_dir, driver=driver, data=data)

    def runner(assembly, record, stop):
        return Outcome(assembly.initial_parameters(), 0, None, finished=True, failure=None)

    with workbench.devices(2):
        summary = run_job(experiment, tmp_path / "run", threading.Event(), runner=runner).summary
    told = f"data.tokenizer_model: {tmp_path / 'tokenizer.json'} has no eos token: no document has an end"
    assert summary["alarms"] == ([] if end else [told])
