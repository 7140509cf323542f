"""Tasks: rows are what they say, settings make a round trip, and models of images train."""

import json
import threading

import jax
import numpy as np
import pytest
import sentencepiece

from configs import multimodal, vit
from ddiloco.config import ConfigError
from ddiloco.run.job import run_job
from ddiloco.settings.experiment import parse, task_of, to_json
from ddiloco.tasks import language_modelling, task_class
from experiments.cli import program
from tests import workbench
from tests.refusals import refusal

PRESETS = [(vit, "tiny"), (vit, "small,streaming"), (vit, "base,data_parallel"), (multimodal, "tiny,diloco")]


def tiny(name, data_dir, **data):
    """The settings of the smallest model of a task, without a tokenizer or images of any size."""
    encoder = {"num_layers": 1, "model_dim": 8, "num_heads": 1, "mlp_dim": 8}
    decoder = {**encoder, "num_kv_heads": 1, "head_dim": 8}
    model = {"dense": decoder, "vit": encoder, "captioner": {**decoder, "patch_size": 4}}[name]
    return {
        "model": {"name": name, **model},
        "data": {"data_dir": data_dir, **data},
        "train": {"steps": 4, "batch_size": 2},
        "inner": {"warmup_steps": 1},
        "sync": {"num_learners": 2, "num_fragments": 2, "interval": 2, "overlap": 1},
        "eval": {"every": 2, "num_batches": 1, "batch_size": 4},
    }


@pytest.mark.parametrize("name", ["dense", "vit", "captioner"])
def test_rows_have_the_shapes_that_the_task_says(name, data_dir):
    experiment = parse(tiny(name, data_dir))
    task = task_of(experiment)
    for batch in (next(task.batches((0, 1), 2, 4)), task.held_out(4, 1)[0]):
        told = {key: ((4, *leaf.shape), np.dtype(leaf.dtype)) for key, leaf in task.row.items()}
        assert {key: (array.shape, array.dtype) for key, array in batch.items()} == told
        assert 0 < batch["weights"].sum() <= 4 * task.row_tokens


@pytest.mark.parametrize("name", ["dense", "vit", "captioner"])
def test_batches_are_a_function_of_the_seed_and_resume(name, data_dir):
    task = task_of(parse(tiny(name, data_dir)))
    first, again = task.batches((1,), 2, 4), task.batches((1,), 2, 4)
    next(first)
    again.set_state(json.loads(json.dumps(first.get_state())))
    jax.tree.map(np.testing.assert_array_equal, next(first), next(again))


def test_a_misspelt_task_is_told_with_what_it_may_be():
    told = "MODEL.task: is 'captoning', but must be one of language_modelling, classification, captioning"
    with pytest.raises(ConfigError, match=told):
        task_class("captoning")


@pytest.mark.parametrize(("config", "preset"), PRESETS, ids=lambda value: getattr(value, "__name__", value))
def test_presets_parse_and_make_a_round_trip(config, preset):
    experiment = parse(config.get_config(preset))
    assert parse(json.loads(json.dumps(to_json(experiment)))) == experiment
    assert (experiment.sample is None) == (config is vit)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "vit",
            {"sample": {"images": 3}},
            "config.sample: is there, but classification (of the model vit) shows",
        ),
        ("vit", {"data": {"sequence_length": 3}}, "config.data.sequence_length: no such setting"),
        ("dense", {"data": 3}, "config.data: is 3, but is a group of settings"),
        (
            "captioner",
            {"model": {"name": "captioner", "vocab_size": 99}},
            "config.model.vocab_size: is 99, but bytes",
        ),
    ],
)
def test_settings_of_another_task_are_told_in_a_line(name, changes, told):
    assert refusal(ConfigError, parse, {**tiny(name, None), **changes}).startswith(told)


def test_a_prompt_without_tokens_is_told_before_anything_is_trained(data_dir, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("learners step on while the syncer merges\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "small"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    values = tiny("dense", data_dir, tokenizer="sentencepiece", tokenizer_model=str(tmp_path / "small.model"))
    told = r"^config\.sample\.prompt: is ' ', of which the tokenizer makes no token; "
    with pytest.raises(ConfigError, match=told):
        task_of(parse({**values, "sample": {"prompt": " "}})).batches((0,), 1, 2)
    task_of(parse({**values, "sample": {"prompt": " ", "tokens": 0}})).batches((0,), 1, 2)
    task_of(parse({**values, "sample": {"prompt": "step"}})).batches((0,), 1, 2)


def test_a_sample_ends_where_the_document_does(data_dir, monkeypatch):
    """No target in training follows the end of a document."""
    written = np.int32([*b"s on", 258, *b"nothing that it learnt"])
    monkeypatch.setattr(language_modelling, "sample", lambda *_: written)
    task = task_of(parse({**tiny("dense", data_dir), "sample": {"prompt": "step"}}))
    assert task.sample({}) == "steps on"


def test_captions_are_shown_with_the_truth_where_they_are_wrong(data_dir):
    experiment = parse({**tiny("captioner", data_dir), "sample": {"images": 3}})
    task = task_of(experiment)
    truth = task.sample(dict(_constant(experiment, task)))
    assert len(truth.splitlines()) == 3
    assert all(line.endswith(")") and "(" in line for line in truth.splitlines())
    assert not task_of(parse({**tiny("captioner", data_dir), "sample": {"images": 0}})).samples


def _constant(experiment, task):
    """Parameters with which the model always writes `a`."""
    from ddiloco.training.parameters import abstract_parameters

    for name, leaf in abstract_parameters(experiment.model).items():
        yield name, np.zeros(leaf.shape, np.float32)


def run(values, workdir):
    with workbench.devices(1):
        result = run_job(parse(values), workdir, threading.Event())
    assert result.failure is None
    return result.summary


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        pytest.param("vit", "streaming", marks=pytest.mark.slow),
        pytest.param("vit", "elastic_data_parallel", marks=pytest.mark.slow),
        ("captioner", "diloco"),
        pytest.param("captioner", "lone_learner", marks=pytest.mark.slow),
    ],
)
def test_images_train_under_every_algorithm(name, algorithm, data_dir, tmp_path):
    values = tiny(name, data_dir)
    values["sync"].update(workbench.POLICIES.get(algorithm, {}))
    if algorithm == "streaming":
        values["sync"]["max_run_ahead"] = 1
    summary = run({**values, "algorithm": algorithm, "driver": "virtual"}, tmp_path)
    assert summary["finished"]
    assert 0 <= summary["eval_accuracy"] <= 1
    assert (tmp_path / "sample.txt").exists() == (name == "captioner")


@pytest.mark.slow
def test_four_learners_classify_at_least_96_percent_of_held_out_digits(tmp_path):
    """The claim of configs/vit.py:tiny, run in full."""
    config = program.load_config("configs/vit.py:tiny")
    assert (config.algorithm, config.sync.num_learners) == ("decoupled", 4)
    config.driver = "virtual"
    config.data.data_dir = str(tmp_path / "tfds")
    assert run(config, tmp_path / "run")["eval_accuracy"] >= 0.96
