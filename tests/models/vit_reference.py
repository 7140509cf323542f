"""The vision transformer once more, in float64 NumPy with explicit loops over images, patches and heads."""

import math

import numpy as np

from tests.models.decoder_reference import under


def layer_norm(x, params, epsilon):
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    return centred / spread * params["scale"] + params["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(params, config, x_LxD):
    out_LxD = np.tile(params["out/bias"], (len(x_LxD), 1))
    no_bias = np.zeros(config.num_heads)
    for head in range(config.num_heads):
        query, key, value = (
            x_LxD @ params[f"{name}/kernel"][:, head] + params.get(f"{name}/bias", no_bias)[head]
            for name in ("query", "key", "value")
        )
        for i in range(len(x_LxD)):
            scores = np.array([query[i] @ other for other in key]) / math.sqrt(key.shape[1])
            weights = np.exp(scores - scores.max())
            out_LxD[i] += (weights / weights.sum()) @ value @ params["out/kernel"][head]
    return out_LxD


def places(config):
    """Sine and cosine of each row, then of each column, at each wavelength."""
    side, quarter = config.image_size // config.patch_size, config.model_dim // 4
    table = np.zeros((side * side, config.model_dim))
    for row in range(side):
        for column in range(side):
            for k in range(quarter):
                turn = 10_000.0 ** (-k / quarter)
                values = (
                    math.sin(row * turn),
                    math.cos(row * turn),
                    math.sin(column * turn),
                    math.cos(column * turn),
                )
                for part, value in enumerate(values):
                    table[row * side + column, part * quarter + k] = value
    return table


def embed(params, config, image_HxWxC):
    mean, std = (np.broadcast_to(values, config.channels) for values in (config.pixel_mean, config.pixel_std))
    side = config.patch_size
    rows = []
    for top in range(0, config.image_size, side):
        for left in range(0, config.image_size, side):
            pixels = []
            for y in range(top, top + side):
                for x in range(left, left + side):
                    pixels += [
                        (image_HxWxC[y, x, c] / 255 - mean[c]) / std[c] for c in range(config.channels)
                    ]
            rows.append(np.array(pixels) @ params["patches/kernel"] + params["patches/bias"])
    x_LxD = np.stack(rows) + (params["positions"] if config.positions == "learned" else places(config))
    return np.concatenate([params["token"][None], x_LxD]) if config.pooling == "token" else x_LxD


def classify(params, config, image_BxHxWxC):
    """Logits (B, C) float64."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    rows = []
    for image_HxWxC in image_BxHxWxC:
        x_LxD = embed(under(params, "embed/"), config, image_HxWxC.astype(np.float64))
        for number in range(config.num_layers):
            layer = under(params, f"layers/{number}/")
            normed = layer_norm(x_LxD, under(layer, "attention_norm/"), config.norm_epsilon)
            x_LxD = x_LxD + attention(under(layer, "attention/"), config, normed)
            normed = layer_norm(x_LxD, under(layer, "mlp_norm/"), config.norm_epsilon)
            hidden = gelu(normed @ layer["mlp/up/kernel"] + layer["mlp/up/bias"])
            x_LxD = x_LxD + hidden @ layer["mlp/down/kernel"] + layer["mlp/down/bias"]
        x_LxD = layer_norm(x_LxD, under(params, "final_norm/"), config.norm_epsilon)
        pooled = x_LxD[0] if config.pooling == "token" else x_LxD.mean(axis=0)
        rows.append(pooled @ params["head/kernel"] + params["head/bias"])
    return np.stack(rows)
