"""The mixture-of-experts decoder once more, in float64 NumPy with loops over rows, tokens and choices."""

import math

import numpy as np

from tests.models import decoder_reference
from tests.models.decoder_reference import gated_mlp, under


def experts(layer, config, x_LxD, segments_L, counts):
    """Each token's gated experts; `counts` is added to."""
    capacity = math.inf
    if config.capacity_factor is not None:
        share = config.capacity_factor * config.experts_per_token * len(x_LxD) / config.num_experts
        capacity = math.ceil(share)
    chosen, taken = np.zeros(config.num_experts), np.zeros(config.num_experts)
    mass, tokens = np.zeros(config.num_experts), 0
    y_LxD = np.zeros_like(x_LxD)
    for t, x_D in enumerate(x_LxD):
        if segments_L[t] == 0:
            continue
        logits = x_D @ layer["router/kernel"]
        probability = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-probability)[: config.experts_per_token]
        gates = probability[best]
        if config.normalize_gates:
            gates = gates / gates.sum()
        for expert, gate in zip(best, gates, strict=True):
            chosen[expert] += 1
            if taken[expert] >= capacity:
                counts["dropped"] += 1
                continue
            taken[expert] += 1
            kernels = {f"{name}/kernel": layer[f"experts/{name}"][expert] for name in ("gate", "up", "down")}
            y_LxD[t] += gate * gated_mlp(kernels, config, x_D[None])[0]
        mass += probability
        tokens += 1
        counts["entropy"] -= np.sum(probability * np.log(probability))
        counts["router_z"] += np.log(np.exp(logits).sum()) ** 2
    counts["load"] += chosen
    counts["routed"] += tokens
    if tokens:
        counts["balance"] += tokens * config.num_experts * np.sum(chosen / chosen.sum() * mass / tokens)
    if config.shared_expert_dim:
        y_LxD += gated_mlp(under(layer, "shared/"), config, x_LxD)
    return y_LxD


def no_counts(config):
    """The counts of a layer before its first row."""
    names = ("entropy", "router_z", "balance", "routed", "dropped")
    return {"load": np.zeros(config.num_experts), **dict.fromkeys(names, 0.0)}


def decode(params, config, inputs_BxL, positions_BxL, segments_BxL):
    """Logits (B, L, V) float64, and the counts stacked over the layers with experts."""
    counts = [no_counts(config) for _ in range(config.num_layers - config.dense_layers)]

    def mlp(number, params, x_LxD, segments_L):
        if number < config.dense_layers:
            return gated_mlp(params, config, x_LxD)
        return experts(params, config, x_LxD, segments_L, counts[number - config.dense_layers])

    logits = decoder_reference.decode(params, config, inputs_BxL, positions_BxL, segments_BxL, mlp)
    return logits, {name: np.stack([layer[name] for layer in counts]) for name in counts[0]}
