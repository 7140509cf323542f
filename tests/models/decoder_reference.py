"""The dense decoder once more, in float64 NumPy with explicit loops over rows, heads and queries."""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def rotate(x_LxH, positions_L, theta):
    half = x_LxH.shape[-1] // 2
    turned = np.empty_like(x_LxH)
    for i in range(half):
        angle = positions_L * theta ** (-2 * i / (2 * half))
        first, second = x_LxH[:, i], x_LxH[:, i + half]
        turned[:, i] = first * np.cos(angle) - second * np.sin(angle)
        turned[:, i + half] = second * np.cos(angle) + first * np.sin(angle)
    return turned


def attention(params, config, x_LxD, positions_L, segments_L):
    length = len(x_LxD)
    out_LxD = np.zeros_like(x_LxD)
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        query = x_LxD @ params["query/kernel"][:, head]
        key = x_LxD @ params["key/kernel"][:, shared]
        value = x_LxD @ params["value/kernel"][:, shared]
        query = rms_norm(query, params["query_norm/scale"], config.norm_epsilon)
        key = rms_norm(key, params["key_norm/scale"], config.norm_epsilon)
        query = rotate(query, positions_L, config.rope_theta)
        key = rotate(key, positions_L, config.rope_theta)
        for i in range(length):
            seen = [j for j in range(i + 1) if segments_L[j] == segments_L[i]]
            scores = np.array([query[i] @ key[j] for j in seen]) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            mixed = (weights / weights.sum()) @ value[seen]
            out_LxD[i] += mixed @ params["out/kernel"][head]
    return out_LxD


def gated_mlp(params, config, x_LxD):
    gate = x_LxD @ params["gate/kernel"]
    if config.activation == "swiglu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (gate * (x_LxD @ params["up/kernel"])) @ params["down/kernel"]


def under(params, prefix):
    return {name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)}


def decode(params, config, inputs_BxL, positions_BxL, segments_BxL, mlp=None):
    """Logits (B, L, V) float64.

    `mlp(number, params, x_LxD, segments_L)` takes the place of the gated MLP of the layer of that number.
    """
    mlp = mlp or (lambda number, params, x_LxD, segments_L: gated_mlp(params, config, x_LxD))
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    rows = []
    for inputs_L, positions_L, segments_L in zip(inputs_BxL, positions_BxL, segments_BxL, strict=True):
        x_LxD = params["embed/embedding"][inputs_L] * np.sqrt(config.model_dim)
        for number in range(config.num_layers):
            layer = under(params, f"layers/{number}/")
            normed = rms_norm(x_LxD, layer["attention_norm/scale"], config.norm_epsilon)
            x_LxD = x_LxD + attention(under(layer, "attention/"), config, normed, positions_L, segments_L)
            normed = rms_norm(x_LxD, layer["mlp_norm/scale"], config.norm_epsilon)
            x_LxD = x_LxD + mlp(number, under(layer, "mlp/"), normed, segments_L)
        x_LxD = rms_norm(x_LxD, params["final_norm/scale"], config.norm_epsilon)
        head = params["embed/embedding"].T if config.tie_embeddings else params["head/kernel"]
        rows.append(x_LxD @ head)
    return np.stack(rows)
