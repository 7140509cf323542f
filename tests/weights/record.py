"""Records what transformers computes, for tests where it is not installed: python tests/weights/record.py

Each folder of recorded/ gets a model with random weights as transformers itself saves it, inputs and the
logits that it has for them. Recorded with transformers 5.23.0 and torch 2.13.0.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

RECORDED = pathlib.Path(__file__).parent / "recorded"
DECODER = {
    "vocab_size": 32,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
IMAGES = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "num_labels": 5,
}
MODELS = {
    "qwen3": transformers.Qwen3Config(**DECODER, rms_norm_eps=1e-5),
    "qwen3_tied": transformers.Qwen3Config(
        **DECODER, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**DECODER, **EXPERTS),
    "vit": transformers.ViTConfig(**IMAGES),
}


def record(name: str, config: transformers.PreTrainedConfig) -> None:
    """Writes one folder."""
    images = isinstance(config, transformers.ViTConfig)
    auto = transformers.AutoModelForImageClassification if images else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    rng = torch.Generator().manual_seed(0)
    for tensor in model.parameters():  # none at a special value
        tensor.data = torch.randn(tensor.shape, generator=rng) * 0.3 + (tensor.ndim == 1 and not images)
    shape = (2, 3, 8, 8) if images else (2, 16)
    inputs = torch.randint(0, 256 if images else config.vocab_size, shape, generator=rng)
    with torch.no_grad():
        logits = model((inputs / 255 - 0.5) / 0.5 if images else inputs).logits
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "logits.npz", inputs=inputs.numpy().astype(np.int16), logits=logits.numpy())


if __name__ == "__main__":
    for name, config in MODELS.items():
        record(name, config)
