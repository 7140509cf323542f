"""Terms that learners and syncer must share before they exchange fragments."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.encoding import wire_format
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.protocol.schedule import fragments_of
from ddiloco.settings.experiment import Experiment, all_settings

MAX_SHOWN_LENGTH = 100  # characters of a setting's value in a refusal


@dataclasses.dataclass(frozen=True)
class Terms:
    """The settings and layout that both sides must share."""

    fingerprint: str  # of the fragment layout
    rules: str  # the settings that both sides must share, JSON by path
    num_learners: int  # M; as many as the run starts with
    max_learners: int  # as many as it may have; they are numbered below it
    # By learner, those beyond as the last, and by fragment: shapes and dtypes of what it sends
    up: Sequence[Sequence[Sequence[ArrayFormat]]]
    down: Sequence[Sequence[ArrayFormat]]  # by fragment, the same of what the syncer sends, a whole version
    difference: Sequence[Sequence[ArrayFormat]]  # the same of a difference between versions
    offer_timeout: float  # seconds that a fragment may take
    silence_timeout: float = 60.0  # seconds without a word after which a learner is not there
    hosts: Sequence[int] = ()  # by learner, the hosts that the syncer keeps room for; (): one each
    shards: int = 1  # processes of the syncer

    @property
    def num_fragments(self) -> int:
        """P."""
        return len(self.down)

    def fragments(self, shard: int) -> tuple[int, ...]:
        """The fragments of a shard."""
        return fragments_of(shard, self.shards, self.num_fragments)

    def offers(self, learner: int) -> Sequence[Sequence[ArrayFormat]]:
        """By fragment, shapes and dtypes of what the learner sends."""
        return self.up[min(learner, len(self.up) - 1)]

    def room(self, learner: int) -> int:
        """The hosts of the learner that the syncer keeps room for."""
        return self.hosts[learner] if self.hosts else 1

    def misfit(self, fingerprint: str, rules: str) -> str | None:
        """In one line, why a process with these is not of this run; None: they are the same."""
        differs = difference(self.rules, rules)
        if differs is None and fingerprint != self.fingerprint:
            return "its model or fragments are others: the layouts' fingerprints differ"
        return differs


def terms_of(experiment: Experiment, layout: FragmentLayout) -> Terms:
    """The terms of an experiment whose number of steps is known."""
    outer, fragments = experiment.outer, range(layout.num_fragments)
    found = (leaf for leaf in all_settings(experiment) if leaf.metadata["both_ends"])
    forms = {codec: [wire_format(layout, p, codec) for p in fragments] for codec in outer.codecs}
    rules = {leaf.path: leaf.value for leaf in found if leaf.metadata["may_change"] != "process"}
    return Terms(
        fingerprint=layout.fingerprint,
        rules=json.dumps(rules, sort_keys=True, default=str),
        num_learners=experiment.sync.num_learners,
        max_learners=experiment.max_learners,
        up=[forms[codec] for codec in outer.each_codec],
        down=[wire_format(layout, p, "f32") for p in fragments],
        difference=[wire_format(layout, p, outer.update_codec) for p in fragments],
        offer_timeout=experiment.sync.offer_timeout,
        silence_timeout=experiment.sync.silence_timeout,
        hosts=experiment.remote.hosts,
        shards=experiment.syncer_shards,
    )


def difference(ours: str, theirs: str) -> str | None:
    """In one line, the first of the rules of the two ends that is not the same; None: all are."""
    if ours == theirs:
        return None
    try:
        own, other = dict(json.loads(ours)), dict(json.loads(theirs))
    except (ValueError, TypeError, RecursionError):
        return "the learner's settings are not the syncer's"
    for path in [*own, *sorted(other)]:
        if own.get(path) != other.get(path) or (path in own) is not (path in other):
            values = (_shown(path, rules) for rules in (own, other))
            return "config.{}: the syncer has {}, the learner {}".format(path[:MAX_SHOWN_LENGTH], *values)
    return "the learner's settings are not the syncer's"


def _shown(path: str, rules: dict[str, Any]) -> str:
    return repr(rules[path])[:MAX_SHOWN_LENGTH] if path in rules else "no such setting"
