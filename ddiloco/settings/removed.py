"""Settings of earlier versions that are constants now, with the value or the setting to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddiloco.config import ConfigError

REMOVED = {
    "data.fewest_digits": "a canvas has one to three",
    "data.held_out_pool": "it is of 4,194,304 tokens",
    "data.image_feature": "it is the one that TFDS calls supervised, or the only image",
    "data.keep": "decoded images stay in memory where all of them take 256 MiB at most",
    "data.label_feature": "it is the one that TFDS calls supervised, or the only class label",
    "data.most_digits": "a canvas has one to three",
    "inner.decay_embeddings": "embeddings do not decay",
    "inner.eps": "it is 1e-8",
    "inner.momentum": "Muon's is 0.95",
    "inner.update_rms": "it is 0.2",
    "model.logit_softcap": "logits are not capped",
    "model.qk_norm": "queries and keys are always normed",
    "outer.final_rate": "the outer rate stays",
    "outer.guard.release": "a learner is let in again after 24 offers",
    "outer.guard.strikes": "three of twelve offers put a learner in quarantine",
    "outer.guard.warm_up": "it is 6 rounds",
    "outer.momentum_every": "delayed_nesterov's momentum steps every 4 rounds",
    "outer.rate_rounds": "the outer rate stays",
    "outer.split_large": "large tensors are cut along their rows",
    "remote.checkpoint_every": "it is recovery.checkpoint_every",
    "remote.donor_host": "it is the machine's own address, or the one of remote.interface",
    "remote.copies": "it is recovery.checkpoint_folder",
    "remote.handshake": "it is 20 s",
    "remote.keep_versions": "it is recovery.keep_versions",
    "remote.parts": "it is remote.syncer_shards, which counts all processes of the syncer",
    "resume": "it is --resume, or --resume=NUMBER for a snapshot",
    "sdc_check_every": "it is train.verify_every",
    "sample.temperature": "it is 0.7",
    "tape.max_gib": "it is 4 GiB",
    "train.steps_in_flight": "it is 2",
    "virtual.lives": "it is virtual.availability",
    "virtual.notice_seconds": "it is virtual.failures.detection_seconds",
}


def refusal(path: str) -> str | None:
    """The error for a removed setting; None: there never was one."""
    return f"config.{path}: is a setting no more: {REMOVED[path]}" if path in REMOVED else None


def check(values: Mapping[str, Any]) -> None:
    """Raises ConfigError if one of these is set."""
    for path in REMOVED:
        group: Any = values
        for name in path.split("."):
            group = group.get(name) if hasattr(group, "items") else None
        if group is not None:
            raise ConfigError(str(refusal(path)))
