"""Qwen3 (arXiv 2505.09388), the counterpart of the dense decoder, and Qwen3-MoE, that of the experts."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ddiloco.config import ConfigError, build
from ddiloco.models.dense import DenseConfig, embedding_gain
from ddiloco.models.moe import MoEConfig
from ddiloco.training.parameters import parameter_shapes
from ddiloco.weights.counterpart import CONFIG, Counterpart, Field, Table, needs, read_entries, settings_of

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_MLP = ("gate", "up", "down")
_OF_EXPERTS = {"capacity_factor": None, "shared_expert_dim": 0}  # what Qwen3-MoE has, always


def dense(config: DenseConfig) -> Counterpart:
    """The dense decoder as Qwen3ForCausalLM."""
    table = _trunk(config)
    for number in range(config.num_layers):
        _mlp(table, number)
    files, more = {CONFIG: _dense_fields(config)}, {CONFIG: {"model_type": "qwen3"}}
    return Counterpart("Qwen3ForCausalLM", (), files, more, table)


def moe(config: MoEConfig) -> Counterpart:
    """The mixture of experts as Qwen3MoeForCausalLM."""
    c, table = config, _trunk(config)
    for number in range(c.num_layers):
        ours, theirs = f"layers/{number}/mlp", f"model.layers.{number}.mlp"
        if number < c.dense_layers:
            _mlp(table, number)
            continue
        table.linear(f"{ours}/router/kernel", f"{theirs}.gate.weight")
        for name in _MLP:
            experts = [f"{theirs}.experts.{e}.{name}_proj.weight" for e in range(c.num_experts)]
            table.linears(f"{ours}/experts/{name}", experts)
    files, more = {CONFIG: _moe_fields(c)}, {CONFIG: {"model_type": "qwen3_moe"}}
    differences = needs(c, "Qwen3-MoE", **_OF_EXPERTS)
    return Counterpart("Qwen3MoeForCausalLM", differences, files, more, table)


class _Family(NamedTuple):
    name: str  # of our model
    config: type[DenseConfig]
    fields: Callable[[Any], tuple[Field, ...]]
    needed: dict[str, Any]


def model_settings(folder: pathlib.Path) -> dict[str, Any]:
    """The settings of `config.model`, its `name` first, of the decoder whose `config.json` is in the folder.

    Raises:
      ConfigError: it is no Qwen3 or Qwen3-MoE, or lacks an entry; the message names the file.
    """
    path = folder / CONFIG
    entries = read_entries(path)
    families = {
        "Qwen3ForCausalLM": _Family("dense", DenseConfig, _dense_fields, {}),
        "Qwen3MoeForCausalLM": _Family("moe", MoEConfig, _moe_fields, _OF_EXPERTS),
    }
    found = entries.get("architectures") or [None]
    family = families.get(found[0])
    if family is None:
        raise ConfigError(f"config.init_from: {path}: is of {found}, but must be of {' or '.join(families)}")
    config = family.config()
    for _ in range(2):  # once more, since a default may follow from other entries
        settings = {**family.needed, **settings_of(family.fields(config), path, entries)}
        config = build(family.config, settings, "config.model")
    return {"name": family.name, **settings}


def _dense_fields(config: DenseConfig) -> tuple[Field, ...]:
    # Layers of another kind would see a part of the text alone
    kinds = ["full_attention"] * config.num_layers
    return (*_fields(config, 128), Field("layer_types", kinds, None, kinds, written=False))


def _moe_fields(config: MoEConfig) -> tuple[Field, ...]:
    c = config
    return (
        *_fields(c, c.model_dim // c.num_heads),
        Field("num_experts", c.num_experts, "num_experts"),
        Field("num_experts_per_tok", c.experts_per_token, "experts_per_token"),
        Field("moe_intermediate_size", c.expert_dim, "expert_dim"),
        Field("norm_topk_prob", c.normalize_gates, "normalize_gates", False),
        Field("mlp_only_layers", list(range(c.dense_layers)), "dense_layers", [], ours=len),
        Field("decoder_sparse_step", 1, None, 1),
    )


def _fields(config: DenseConfig, head_dim: int) -> tuple[Field, ...]:
    """`head_dim`: where a file does not say it."""
    c = config
    return (
        Field("vocab_size", c.vocab_size, "vocab_size"),
        Field("hidden_size", c.model_dim, "model_dim"),
        Field("num_hidden_layers", c.num_layers, "num_layers"),
        Field("num_attention_heads", c.num_heads, "num_heads"),
        Field("num_key_value_heads", c.num_kv_heads, "num_kv_heads"),
        Field("head_dim", c.head_dim, "head_dim", head_dim),
        Field("intermediate_size", c.mlp_dim, "mlp_dim"),
        Field("hidden_act", ACTIVATIONS[c.activation], "activation", "silu", ours=_activation),
        Field("tie_word_embeddings", c.tie_embeddings, "tie_embeddings", False),
        Field("rms_norm_eps", c.norm_epsilon, "norm_epsilon", 1e-6),
        Field("rope_theta", c.rope_theta, "rope_theta", 10_000.0),
        Field("rope_type", "default", written=False),
        Field("attention_bias", False, None, False),
        Field("use_sliding_window", False, None, False),
    )


def _activation(theirs: str) -> str:
    """Ours of that name; theirs where we have none, which no setting may be."""
    return {name: ours for ours, name in ACTIVATIONS.items()}.get(theirs, theirs)


def _trunk(config: DenseConfig) -> Table:
    """All tensors but those of the MLPs."""
    gain, tied = embedding_gain(config), config.tie_embeddings
    table = Table(parameter_shapes(config))
    table.same("embed/embedding", "model.embed_tokens.weight", gain=gain)
    # A tied head of theirs has the gain too, and the norm before it takes it back.
    table.same("final_norm/scale", "model.norm.weight", gain=1 / gain if tied else 1.0)
    if tied:
        table.copies["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        table.linear("head/kernel", "lm_head.weight")
    for number in range(config.num_layers):
        ours, theirs = f"layers/{number}", f"model.layers.{number}"
        table.same(f"{ours}/attention_norm/scale", f"{theirs}.input_layernorm.weight")
        table.same(f"{ours}/mlp_norm/scale", f"{theirs}.post_attention_layernorm.weight")
        for name, proj in _PROJECTIONS.items():
            table.linear(f"{ours}/attention/{name}/kernel", f"{theirs}.self_attn.{proj}.weight", outputs=2)
        table.linear(f"{ours}/attention/out/kernel", f"{theirs}.self_attn.o_proj.weight")
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            table.same(f"{ours}/attention/{name}/scale", f"{theirs}.self_attn.{norm}.weight")
    return table


def _mlp(table: Table, number: int) -> None:
    for name in _MLP:
        table.linear(f"layers/{number}/mlp/{name}/kernel", f"model.layers.{number}.mlp.{name}_proj.weight")
