"""What an export leaves: the same parameters again, in one file or several, and a tokenizer of bytes."""

import json

import numpy as np
import pytest
import sentencepiece
from safetensors import safe_open

from ddiloco.config import ConfigError
from ddiloco.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from ddiloco.models.captioner import CaptionerConfig
from ddiloco.weights.export import export
from ddiloco.weights.initial import InitialWeights
from tests.models.parameters import random_parameters
from tests.weights.cases import CASES, experiment_of, model, pixels
from tests.workbench import assert_equal

EXACT = {"qwen3": {"model_dim": 16}, "qwen3_tied": {"scale_embeddings": False}}  # sqrt(12) is not a float


@pytest.mark.parametrize(("case", "shard_bytes"), [*((case, 6000) for case in CASES), ("qwen3", 10**9)])
def test_what_was_exported_is_read_bit_for_bit(case, shard_bytes, tmp_path):
    config = model(case, **EXACT.get(case, {"model_dim": 16}))
    params = random_parameters(config)
    assert export(experiment_of(config), params, tmp_path / "new", shard_bytes) == []
    assert_equal(dict(InitialWeights(config, tmp_path / "new")), params)


def test_scaled_embeddings_come_back_within_a_unit_in_the_last_place(tmp_path):
    config = model("qwen3_tied")
    params = random_parameters(config)
    export(experiment_of(config), params, tmp_path)
    for name, found in InitialWeights(config, tmp_path).items():
        np.testing.assert_array_max_ulp(found, params[name], maxulp=1)


def test_shards_are_no_larger_than_asked_for_and_their_index_names_every_tensor(tmp_path):
    config = model("qwen3_moe")
    export(experiment_of(config), random_parameters(config), tmp_path, 6000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    held, total = {}, 0
    for path in files:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        held |= dict.fromkeys(tensors, path.name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 6000
        total += size
    assert (held, total) == (index["weight_map"], index["metadata"]["total_size"])


def test_a_tensor_is_made_only_when_its_turn_to_be_written_has_come(tmp_path):
    config = model("qwen3")
    params, asked = random_parameters(config), []

    class Watched(dict):
        def __getitem__(self, name):
            asked.append((name, len(list(tmp_path.glob("*.safetensors")))))
            return super().__getitem__(name)

    export(experiment_of(config), Watched(params), tmp_path, 1)
    assert [files for _, files in asked] == list(range(len(params)))


@pytest.mark.parametrize(
    ("case", "changes", "told"),
    [
        ("qwen3_moe", {"capacity_factor": 1.5}, "config.model.capacity_factor: is 1.5, but must be None"),
        ("vit", {"pooling": "mean"}, "config.model.pooling: is mean, but must be token"),
    ],
)
def test_what_transformers_has_not_is_told_in_a_line(case, changes, told, tmp_path):
    config = model(case, **changes)
    with pytest.raises(ConfigError, match=told) as error:
        export(experiment_of(config), random_parameters(config), tmp_path / "new")
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


def test_a_model_without_counterpart_is_told_in_a_line(tmp_path):
    with pytest.raises(ConfigError, match="CaptionerConfig has no counterpart"):
        export(experiment_of(CaptionerConfig()), {}, tmp_path)


TEXTS = ["def f(x):\n\treturn  x", "häß 漢字 🙂 \x00\x7f", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_of_bytes_is_written_as_one_that_others_read(text, tmp_path):
    config = model("qwen3", vocab_size=259)
    export(experiment_of(config, data={"sequence_length": 64}), random_parameters(config), tmp_path)
    ours, written = ByteTokenizer(), HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))
    assert written.encode(text).tolist() == ours.encode(text).tolist()
    special = (written.pad, written.bos, written.eos)
    assert special == (ours.pad, ours.bos, ours.eos) and written.vocab_size == ours.vocab_size
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 64


def test_a_published_tokenizer_goes_on_with_the_weights(tmp_path):
    config = model("qwen3", vocab_size=300)
    export(experiment_of(config), random_parameters(config), tmp_path / "bytes")
    file = tmp_path / "bytes" / "tokenizer.json"
    e = experiment_of(config, data={"tokenizer": "huggingface", "tokenizer_model": str(file)})
    assert export(e, random_parameters(config), tmp_path / "again") == []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == file.with_name(name).read_bytes()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == ByteTokenizer.eos


def test_a_sentencepiece_model_is_copied_and_that_is_told(tmp_path):
    words = iter(["one word and another", "a word or two words"] * 50)
    file = tmp_path / "small.model"
    with file.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=writer, vocab_size=20, minloglevel=2
        )
    config = model("qwen3", vocab_size=32)
    e = experiment_of(config, data={"tokenizer": "sentencepiece", "tokenizer_model": str(file)})
    [line] = export(e, random_parameters(config), tmp_path / "new")
    assert line.startswith("tokenizer: tokenizer.model is for the package sentencepiece")
    assert (tmp_path / "new" / "tokenizer.model").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_makes_our_tokens_of_a_text(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = model("qwen3", vocab_size=259)
    export(experiment_of(config), random_parameters(config), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert ids == [ByteTokenizer.bos, *ByteTokenizer().encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_transformers_makes_our_pixels_of_an_image(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = model("vit", pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.4,))
    export(experiment_of(config), random_parameters(config), tmp_path)
    image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    made = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="np")
    np.testing.assert_allclose(
        made.pixel_values, pixels(config, image.transpose(2, 0, 1)[None]), rtol=0, atol=1e-6
    )
