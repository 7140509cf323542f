"""False alarms of the guard: each preset here trains honestly, with a smaller model, for a thousand rounds.

  python -m experiments.sweep --sweep=configs/sweeps/honest.py --output=runs/honest

15 runs in virtual time; `left_out` of each should be 0. So small a batch is harder on the guard than the
preset itself: learners differ more. Its outcome: docs/results/security.md.
"""

import importlib
import math

COLUMNS = ("eval_loss", "rounds", "left_out", "merged_share")  # of the table
ROUNDS = 1000
RUN = {
    "driver": "virtual",
    "train.tokens": None,
    "virtual.seconds": None,
    "eval.every": 0,
    "eval.num_batches": 1,
}
TEXT = {
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.mlp_dim": 64,
    "train.batch_size": 2,
}
EXPERTS = {**TEXT, "model.num_experts": 4, "model.experts_per_token": 2, "model.expert_dim": 32}
IMAGES = {"model.num_layers": 2, "model.model_dim": 32, "model.num_heads": 2, "model.mlp_dim": 64}
SHORT = {"data.sequence_length": 64}
PRESETS = {  # and what is made smaller
    "micro": {"train.batch_size": 2, **SHORT},
    "micro:moe": {"train.batch_size": 2, **SHORT},
    "micro:vit": {"train.batch_size": 4},
    "micro:multimodal": {"train.batch_size": 2},
    "dense:tiny": {**TEXT, **SHORT},
    "dense:tiny,streaming": {**TEXT, **SHORT},
    "dense:tiny,diloco": {**TEXT, **SHORT},
    "moe:tiny": {**EXPERTS, **SHORT},
    "vit:tiny": {**IMAGES, "train.batch_size": 4},
    "multimodal:tiny": TEXT,
    "heterogeneous:grace": {**TEXT, **SHORT},
    "heterogeneous:all": {**TEXT, **SHORT},
    "heterogeneous:first": {**TEXT, **SHORT},
    "chaos": {**TEXT, **SHORT},
    "scavenging": {**TEXT, **SHORT},
}


def get_sweep() -> list[dict]:
    """Each preset, with steps for that many rounds."""
    points = []
    for preset, smaller in PRESETS.items():
        name, colon, argument = preset.partition(":")
        get_config = importlib.import_module(f"configs.{name}").get_config
        sync = (get_config(argument) if colon else get_config()).sync
        steps = math.ceil(ROUNDS * sync.interval / sync.num_fragments) + 2 * sync.interval
        config = f"configs/{name}.py{colon}{argument}"
        points.append({"config": config, **smaller, **RUN, "train.steps": steps})
    return points
