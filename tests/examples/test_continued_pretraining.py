"""Continued pre-training: from the layout of transformers, on JSON lines, to that layout again."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from experiments.cli import program
from tests.refusals import refusal

CONFIG = "experiments/examples/continued_pretraining.py"
WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 16, 2, 1, 8, 32, 2
WORDS = ["a", "learner", "sends", "its", "fragment", "and", "the", "syncer", "merges", "what", "it", "has"]
SHORT = (
    "--config.model.compute_dtype=float32",
    "--config.data.sequence_length=32",
    "--config.train.steps=48",
    "--config.train.batch_size=4",
    "--config.train.min_step_seconds=(0.01, 0.01)",
    "--config.sync.num_learners=2",
    "--config.sync.num_fragments=4",
    "--config.sync.interval=8",
    "--config.inner.learning_rate=0.01",
    "--config.inner.warmup_steps=4",
    "--config.eval.every=48",
    "--config.eval.num_batches=2",
    "--config.eval.batch_size=4",
    "--config.export.every=24",
    "--config.sample.tokens=0",
)


def tensors():
    """Of a Qwen3 with random weights, by the names of transformers, (out, in), bfloat16 as published ones."""
    rng = np.random.default_rng(0)
    heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    attention = {
        "q_proj": (heads, WIDTH),
        "k_proj": (kv, WIDTH),
        "v_proj": (kv, WIDTH),
        "o_proj": (WIDTH, heads),
    }
    mlp = {"gate_proj": (MLP, WIDTH), "up_proj": (MLP, WIDTH), "down_proj": (WIDTH, MLP)}
    norms = {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    norms |= {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    shapes = {"model.embed_tokens": (64, WIDTH), "lm_head": (64, WIDTH), "model.norm": (WIDTH,)}
    for n in range(LAYERS):
        shapes |= {f"model.layers.{n}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"model.layers.{n}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"model.layers.{n}.{name}": (size,) for name, size in norms.items()}
    return {
        f"{name}.weight": (0.1 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture
def weights(tmp_path):
    """A folder as transformers saves it: weights, settings, and a tokenizer of words."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    entries = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
    }
    (folder / "config.json").write_text(json.dumps(entries))
    ids = {word: number for number, word in enumerate(["<eos>", "<unk>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


@pytest.fixture
def files(tmp_path):
    """The pattern of two files of JSON lines, whose words come in an order that can be learned."""
    folder, rng = tmp_path / "data", np.random.default_rng(1)
    folder.mkdir()
    for number in range(2):
        begins = rng.integers(0, len(WORDS), 200)
        documents = [" ".join((WORDS[begin:] + WORDS) * 3) for begin in begins]
        lines = [json.dumps({"text": text, "source": number}) for text in documents]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return f"{folder}/*.jsonl"


def test_the_settings_of_the_model_are_those_of_its_config_json(weights):
    config = program.load_config(f"{CONFIG}:{weights}")
    shape = (
        config.model.num_layers,
        config.model.model_dim,
        config.model.num_kv_heads,
        config.model.rope_theta,
    )
    assert (config.model.name, *shape) == ("dense", LAYERS, WIDTH, KV_HEADS, 1e6)
    assert config.init_from == str(weights)


def test_a_folder_without_a_decoder_is_refused_in_a_line(tmp_path):
    told = refusal(program.UsageError, lambda: program.load_config(f"{CONFIG}:{tmp_path}"))
    assert told.endswith(f"config.init_from: {tmp_path}/config.json: No such file or directory")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    told = refusal(program.UsageError, lambda: program.load_config(f"{CONFIG}:{tmp_path}"))
    assert told.endswith("is of ['LlamaForCausalLM'], but must be of Qwen3ForCausalLM or Qwen3MoeForCausalLM")


@pytest.fixture
def continued(weights, files, programs, tmp_path):
    """The workdir of a run that began at the weights, and the folder of its export."""
    workdir, to = tmp_path / "run", tmp_path / "continued"
    data = f"--config.data.name={files}", f"--config.data.data_dir={tmp_path / 'tfds'}"
    done = programs.run("train", f"--config={CONFIG}:{weights}", f"--workdir={workdir}", *data, *SHORT)
    assert done.returncode == 0, done.stderr
    done = programs.run("export", f"--workdir={workdir}", f"--to={to}")
    assert done.returncode == 0, done.stderr
    return workdir, to


@pytest.mark.slow
def test_weights_are_trained_on_and_come_back_in_the_layout_of_transformers(weights, continued):
    workdir, to = continued
    first, *_, last = json.loads((workdir / "summary.json").read_text())["eval_history"]
    assert last["loss"] < first["loss"] / 2
    before, after = (load_file(folder / "model.safetensors") for folder in (weights, to))
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    assert all((after[name] != x).any() for name, x in before.items())
    settings, own = (json.loads((folder / "config.json").read_text()) for folder in (weights, to))
    assert settings.items() <= own.items()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (to / name).read_bytes() == (weights / name).read_bytes()
    newest = json.loads((workdir / "export/newest.json").read_text())
    assert newest["step"] >= 24 and (workdir / "export" / newest["folder"] / "model.safetensors").is_file()


@pytest.mark.slow
def test_transformers_loads_the_result_which_knows_the_order_of_the_words(weights, continued):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    losses = []
    for folder in (weights, continued[1]):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = transformers.AutoTokenizer.from_pretrained(folder)(" ".join(WORDS * 2), return_tensors="pt")
        with torch.no_grad():
            losses.append(model(ids.input_ids, labels=ids.input_ids).loss.item())
    assert losses[1] < losses[0] / 2
