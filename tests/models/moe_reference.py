"""The mixture-of-experts decoder once more, in float64 NumPy with loops over rows, tokens and choices."""

import math

import numpy as np

from tests.models.decoder_reference import attention, gated_mlp, rms_norm, under


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
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    counts = [no_counts(config) for _ in range(config.num_layers - config.dense_layers)]
    rows = []
    for inputs_L, positions_L, segments_L in zip(inputs_BxL, positions_BxL, segments_BxL, strict=True):
        x_LxD = params["embed/embedding"][inputs_L] * np.sqrt(config.model_dim)
        for number in range(config.num_layers):
            layer = under(params, f"layers/{number}/")
            normed = rms_norm(x_LxD, layer["attention_norm/scale"], config.norm_epsilon)
            x_LxD = x_LxD + attention(under(layer, "attention/"), config, normed, positions_L, segments_L)
            normed = rms_norm(x_LxD, layer["mlp_norm/scale"], config.norm_epsilon)
            if number < config.dense_layers:
                x_LxD = x_LxD + gated_mlp(under(layer, "mlp/"), config, normed)
            else:
                counted = counts[number - config.dense_layers]
                x_LxD = x_LxD + experts(under(layer, "mlp/"), config, normed, segments_L, counted)
        x_LxD = rms_norm(x_LxD, params["final_norm/scale"], config.norm_epsilon)
        head = params["embed/embedding"].T if config.tie_embeddings else params["head/kernel"]
        rows.append(x_LxD @ head)
    return np.stack(rows), {name: np.stack([layer[name] for layer in counts]) for name in counts[0]}
