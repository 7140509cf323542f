"""Weights to begin from: read when they are asked for, and refused in a line that says what does not fit."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddiloco.config import ConfigError, build
from ddiloco.models import MODELS
from ddiloco.weights.export import export
from ddiloco.weights.initial import InitialWeights
from ddiloco.weights.qwen3 import model_settings
from tests.models.parameters import random_parameters
from tests.refusals import refusal
from tests.weights.cases import CASES, RECORDED, experiment_of, model
from tests.workbench import assert_equal

MOE = model("qwen3_moe", model_dim=16)


@pytest.fixture
def folder(tmp_path):
    """An export of `MOE`."""
    export(experiment_of(MOE), random_parameters(MOE), tmp_path)
    return tmp_path


def with_tensors(folder, change):
    """Writes the tensors of the folder's file as `change` leaves them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def with_entries(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def refused(config, path):
    return refusal(ConfigError, lambda: dict(InitialWeights(config, path)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_numbers_of_fewer_bits_become_float32(folder, dtype):
    with_tensors(folder, lambda t: t.update({name: tensor.astype(dtype) for name, tensor in t.items()}))
    expected = {name: x.astype(dtype).astype(np.float32) for name, x in random_parameters(MOE).items()}
    assert_equal(dict(InitialWeights(MOE, folder)), expected)


def test_only_the_tensor_that_is_asked_for_is_read(folder):
    norm = "model.layers.0.input_layernorm.weight"
    with_tensors(folder, lambda t: t.update({norm: t[norm].astype(np.int32)}))
    weights = InitialWeights(MOE, folder / "model.safetensors")  # which stands for its folder
    weights["final_norm/scale"]
    assert "layers/0/attention_norm/scale" in weights
    with pytest.raises(ConfigError, match=f"{norm} is of I32, but must be of F32, BF16, F16"):
        weights["layers/0/attention_norm/scale"]


def test_a_tensor_that_is_missing_too_much_or_of_another_shape_is_named(folder):
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    with_tensors(folder, lambda t: t.update({down: t[down].T.copy()}))
    assert f"{down} has shape (8, 16), but must have (16, 8)" in refused(MOE, folder)
    with_tensors(folder, lambda t: t.pop(down))
    assert f"has no tensor {down}" in refused(MOE, folder)
    with_tensors(folder, lambda t: t.update({down: np.zeros((16, 8), np.float32), "other": np.zeros(1)}))
    assert "has a tensor other, which the model has not" in refused(MOE, folder)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            {"rope_parameters": None, "rope_theta": 1e6},
            "config.model.rope_theta: gives a rope_theta of 500.0, but must give 1000000.0, as",
        ),
        ({"hidden_act": "gelu_pytorch_tanh"}, "config.model.activation: gives a hidden_act of 'silu'"),
        ({"mlp_only_layers": [1]}, "config.model.dense_layers: gives a mlp_only_layers of [0]"),
        ({"vocab_size": None}, "config.json: has no vocab_size"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn', but only 'default'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', but only 'default'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "has some for full_attention, but only",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors'"),
        ({"architectures": ["LlamaForCausalLM"]}, "is of ['LlamaForCausalLM'], but the settings under"),
    ],
)
def test_an_architecture_that_is_not_that_of_the_settings_is_told(folder, entries, told):
    with_entries(folder, **entries)
    assert told in refused(MOE, folder)


def test_all_settings_that_differ_are_told_together(folder):
    with_entries(folder, rope_theta=1e6, head_dim=4)
    told = refused(MOE, folder)
    differing = "config.model.head_dim: gives a head_dim of 6, but must give 4; model.rope_theta: gives "
    assert told.startswith(differing) and told.endswith(f", as {folder}/config.json has it")


def test_what_later_releases_write_is_understood(folder):
    """Rotary positions in a group of their own, another name for the experts' number, null for a default."""
    path = folder / "config.json"
    entries = json.loads(path.read_text())
    entries["rope_parameters"] = {"rope_theta": entries.pop("rope_theta"), "rope_type": "default"}
    entries["num_local_experts"] = entries.pop("num_experts")
    entries["use_sliding_window"] = None
    path.write_text(json.dumps(entries))
    assert_equal(dict(InitialWeights(MOE, folder)), random_parameters(MOE))


def test_pixels_that_are_prepared_in_another_way_are_told(tmp_path):
    config = model("vit")
    export(experiment_of(config), random_parameters(config), tmp_path)
    told = refused(model("vit", pixel_std=(0.25,)), tmp_path)
    assert told.startswith("config.model.pixel_std: gives a image_std of [0.25, 0.25, 0.25]")


def test_settings_without_counterpart_are_told(folder):
    assert "config.model.capacity_factor: is 2.0" in refused(
        model("qwen3_moe", model_dim=16, capacity_factor=2.0), folder
    )


def test_a_config_with_a_byte_order_mark_is_read_and_a_mistake_in_one_is_told_with_its_place(folder):
    path = folder / "config.json"
    text = path.read_text()
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_text(text, encoding=encoding)
        assert_equal(dict(InitialWeights(MOE, folder)), random_parameters(MOE))
    path.write_text(text.replace(",", ";", 1))
    assert "config.json: is no JSON object: Expecting ',' delimiter: line 2 column" in refused(MOE, folder)


ROPE = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}, 7.0),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 9.0}, 9.0),
    ({"rope_parameters": None, "rope_theta": 9.0}, 9.0),
    ({"rope_scaling": {"type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}, 7.0),
    ({"rope_scaling": {"type": "default"}, "rope_theta": 9.0}, 9.0),
    ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, 7.0),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 7.0}}, 10_000.0),
    ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}, "rope_theta": 9.0}, 9.0),
    ({"rope_parameters": {"rope_type": "default"}}, 10_000.0),
]


def without_rope(folder, **entries):
    """The entries of the folder's config.json with these for rotary positions."""
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if "rope" not in name}
    path.write_text(json.dumps({**kept, **entries}))
    return path


@pytest.mark.parametrize(("entries", "theta"), ROPE)
def test_of_rotary_settings_in_two_places_those_of_transformers_are_taken(entries, theta, folder):
    without_rope(folder, **entries)
    told = refused(MOE, folder)
    assert f"gives a rope_theta of 500.0, but must give {theta}, as" in told
    assert InitialWeights(model("qwen3_moe", model_dim=16, rope_theta=theta), folder)


@pytest.mark.parametrize(("entries", "theta"), ROPE)
def test_transformers_takes_the_same_rotary_settings(entries, theta, folder):
    transformers = pytest.importorskip("transformers")
    without_rope(folder, **entries)
    found = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    assert (found["rope_type"], found["rope_theta"]) == ("default", theta)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_the_settings_of_a_decoder_are_read_from_its_config_json(case):
    settings = model_settings(RECORDED / case)
    name = settings.pop("name")
    assert name == CASES[case][0]
    assert build(MODELS[name].config, settings) == model(case)


def test_an_entry_that_settings_lack_or_that_none_may_be_is_told(folder):
    with_entries(folder, head_dim=None)
    assert model_settings(folder)["head_dim"] == 16 // 4, "a share of hidden_size, as in transformers"
    with_entries(folder, hidden_act="relu")
    assert "config.model.activation: is 'relu', but must be" in refusal(
        ConfigError, lambda: model_settings(folder)
    )
    with_entries(folder, vocab_size=None)
    assert "config.json: has no vocab_size" in refusal(ConfigError, lambda: model_settings(folder))


def test_defaults_are_those_of_the_architecture(folder, tmp_path):
    """Without a head_dim a dense model has 128, and one of experts a share of hidden_size."""
    with_entries(folder, head_dim=None)
    assert "model.head_dim: gives a head_dim of 6, but must give 4, as" in refused(MOE, folder)
    with_entries(folder, head_dim=6, num_experts=9, num_local_experts=4)
    assert InitialWeights(MOE, folder)
    config = model("qwen3", model_dim=16)
    export(experiment_of(config), random_parameters(config), tmp_path / "dense")
    with_entries(tmp_path / "dense", head_dim=None)
    assert "model.head_dim: gives a head_dim of 6, but must give 128" in refused(config, tmp_path / "dense")
    with_entries(tmp_path / "dense", head_dim=6, layer_types=["full_attention", "sliding_attention"])
    assert "layer_types is ['full_attention', 'sliding_attention'], but" in refused(
        config, tmp_path / "dense"
    )


def in_shards(folder):
    """Exports `MOE` in several files; gives their names, and those of tensors by file."""
    export(experiment_of(MOE), random_parameters(MOE), folder, shard_bytes=6000)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return names, {name: load_file(folder / name) for name in names}


def test_a_tensor_in_two_shards_is_refused_by_name(tmp_path):
    (first, *_, last), tensors = in_shards(tmp_path)
    name = next(iter(tensors[first]))
    save_file({**tensors[last], name: tensors[first][name] + 1}, tmp_path / last)
    assert f"{name} is in {first} and in {last}; it must be in one of them" in refused(MOE, tmp_path)


def test_one_file_beside_an_index_is_read_as_by_transformers(tmp_path):
    (first, *_), _ = in_shards(tmp_path)
    other = random_parameters(MOE, seed=1)
    export(experiment_of(MOE), other, tmp_path)
    assert_equal(dict(InitialWeights(MOE, tmp_path)), other)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / first).unlink()
    assert f"{first}: cannot be read: " in refused(MOE, tmp_path)


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, np.float32), (np.inf, ml_dtypes.bfloat16), (-np.inf, np.float16)]
)
def test_a_tensor_that_is_not_finite_is_refused_with_its_file(value, dtype, tmp_path):
    (*_, last), tensors = in_shards(tmp_path)
    name = next(iter(tensors[last]))
    spoiled = tensors[last][name].astype(dtype)
    spoiled[-1, ..., -1] = value
    save_file({**tensors[last], name: spoiled}, tmp_path / last)
    told = f"config.init_from: {tmp_path / last}: {name} holds numbers that are not finite"
    assert refusal(ConfigError, InitialWeights(MOE, tmp_path).check) == told
    assert refused(MOE, tmp_path) == told


def test_files_that_cannot_be_read_are_told(folder, tmp_path):
    assert "nowhere/config.json: No such file" in refused(MOE, tmp_path / "nowhere")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: cannot be read: " in refused(MOE, folder)
    path.unlink()
    assert f"{path}: cannot be read: " in refused(MOE, folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "index.json: cannot be read: " in refused(MOE, folder)
    (folder / "config.json").write_text("[")
    assert "config.json: is no JSON object" in refused(MOE, folder)


def test_a_head_that_is_the_embedding_may_be_there_twice(tmp_path):
    config = model("qwen3_tied", model_dim=16)
    export(experiment_of(config), random_parameters(config), tmp_path)
    with_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    weights = InitialWeights(config, tmp_path)
    weights.check()
    assert_equal(dict(weights), random_parameters(config))


def test_a_head_that_differs_from_the_embedding_that_it_is_tied_to_is_refused(tmp_path):
    config = model("qwen3_tied", model_dim=16)
    export(experiment_of(config), random_parameters(config), tmp_path)
    with_tensors(tmp_path, lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]}))
    told = f"{tmp_path}/model.safetensors: lm_head.weight differs from model.embed_tokens.weight"
    assert told in refusal(ConfigError, InitialWeights(config, tmp_path).check)
    with_tensors(tmp_path, lambda t: t.update({"lm_head.weight": np.zeros((2, 2), np.float32)}))
    assert "lm_head.weight has shape (2, 2), but must have" in refused(config, tmp_path)
