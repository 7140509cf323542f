"""Honest fleets under the guard: every committed preset, with a smaller model, for a thousand rounds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from experiments.front import cli

ROUNDS = 1000
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
PRESETS: dict[str, dict[str, Any]] = {  # and what is made smaller
    "configs/micro.py": {"train.batch_size": 2, **SHORT},
    "configs/micro.py:moe": {"train.batch_size": 2, **SHORT},
    "configs/micro.py:vit": {"train.batch_size": 4},
    "configs/micro.py:multimodal": {"train.batch_size": 2},
    "configs/dense.py:tiny": {**TEXT, **SHORT},
    "configs/dense.py:tiny,streaming": {**TEXT, **SHORT},
    "configs/dense.py:tiny,diloco": {**TEXT, **SHORT},
    "configs/moe.py:tiny": {**EXPERTS, **SHORT},
    "configs/vit.py:tiny": {**IMAGES, "train.batch_size": 4},
    "configs/multimodal.py:tiny": TEXT,
    "configs/heterogeneous.py:grace": {**TEXT, **SHORT},
    "configs/heterogeneous.py:all": {**TEXT, **SHORT},
    "configs/heterogeneous.py:first": {**TEXT, **SHORT},
    "configs/chaos.py": {**TEXT, **SHORT},
    "configs/scavenging.py": {**TEXT, **SHORT},
}


class Found(NamedTuple):
    """What an honest run came to.

    Attributes:
      rounds: merges.
      offers: in them.
      left_out: of those, the ones that were not merged: false alarms.
      quarantined: learners that were.
    """

    rounds: int
    offers: int
    left_out: int
    quarantined: int


def smaller(preset: str, rounds: int = ROUNDS) -> Any:
    """The settings of a preset with the smaller model, in virtual time, and steps for so many rounds."""
    changes = {**PRESETS[preset], "driver": "virtual", "eval.every": 0, "eval.num_batches": 1}
    config = cli.resolve(preset, list(changes.items()))
    config.train.tokens = config.virtual.seconds = None
    sync = config.sync
    config.train.steps = math.ceil(rounds * sync.interval / sync.num_fragments) + 2 * sync.interval
    return config


def run(preset: str, rounds: int = ROUNDS) -> Found:
    """Trains the preset so far that it has that many rounds, of honest learners."""
    from ddiloco.settings.experiment import parse
    from experiments.studies import byzantine

    done = byzantine.run(parse(smaller(preset, rounds)), {})
    return Found(done.rounds, done.offers, sum(done.left_out.values()), len(done.quarantined))
