"""Our logits against those of transformers: recorded ones, and fresh ones where it is installed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddiloco.weights.export import export
from ddiloco.weights.initial import InitialWeights
from tests.models.parameters import random_parameters
from tests.weights.cases import CASES, RECORDED, experiment_of, logits, model, pixels

OF_TEXT = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        *((case, {}) for case in CASES),
        pytest.param("qwen3_moe", {"scan_layers": True}, marks=pytest.mark.slow),
    ],
)
def test_weights_of_transformers_give_its_logits(case, changes):
    config, recorded = model(case, **changes), np.load(RECORDED / case / "logits.npz")
    ours = logits(config, dict(InitialWeights(config, RECORDED / case)), recorded["inputs"])
    np.testing.assert_allclose(ours, recorded["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_tied"])
def test_embeddings_that_are_not_scaled_give_the_same_logits(case):
    config, recorded = model(case, scale_embeddings=False), np.load(RECORDED / case / "logits.npz")
    ours = logits(config, dict(InitialWeights(config, RECORDED / case)), recorded["inputs"])
    np.testing.assert_allclose(ours, recorded["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_is_what_transformers_saved(case, tmp_path):
    config = model(case)
    export(experiment_of(config), InitialWeights(config, RECORDED / case), tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, RECORDED / case))
    assert ours.keys() == theirs.keys()
    if case == "vit":  # what we do not have apart, and what changes no logits
        token, places = "vit.embeddings.cls_token", "vit.embeddings.position_embeddings"
        theirs[token] = theirs[token] + theirs[places][:, :1]
        theirs[places][:, 0] = 0
        theirs |= {name: 0 * theirs[name] for name in theirs if name.endswith("key.bias")}
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=3e-7, err_msg=name)
    written, saved = (json.loads((f / "config.json").read_text()) for f in (tmp_path, RECORDED / case))
    both = written.keys() & saved.keys() - OF_TEXT
    assert {name: written[name] for name in both} == {name: saved[name] for name in both}


@pytest.mark.parametrize("case", CASES)
def test_transformers_has_our_logits_for_exported_weights(case, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = model(case) if case == "vit" else model(case, vocab_size=259)
    params = random_parameters(config, seed=1)
    export(experiment_of(config), params, tmp_path, shard_bytes=10_000)
    rng = np.random.default_rng(2)
    if case == "vit":
        auto, inputs = transformers.AutoModelForImageClassification, rng.integers(0, 256, (2, 3, 8, 8))
        given = torch.tensor(pixels(config, inputs.astype(np.uint8)))
    else:
        auto, inputs = transformers.AutoModelForCausalLM, rng.integers(0, 256, (2, 16))
        given = torch.from_numpy(inputs)
    with torch.no_grad():
        theirs = auto.from_pretrained(tmp_path).eval()(given).logits.numpy()
    np.testing.assert_allclose(logits(config, params, inputs), theirs, rtol=0, atol=1e-4)
