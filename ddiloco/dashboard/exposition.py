"""A run in Prometheus' format; the table of names is in docs/dashboard.md."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ddiloco.dashboard.advice import advice
from ddiloco.dashboard.view import RunView

STATES = ("stepping", "waiting", "recovering", "spare", "hung", "dead", "finished", "absent")


class Metric(NamedTuple):
    """A metric: its name, what it is, and its value in a view; None: not known. `_total` never falls."""

    name: str
    meaning: str
    of: Callable[..., Any]


def _summary(name: str) -> Callable[[RunView], float | None]:
    return lambda view: view.summary.get(name)


def _syncer(name: str) -> Callable[[RunView], float | None]:
    return operator.attrgetter(f"syncer.{name}")


OF_RUN = (
    Metric("ddiloco_step", "global step: the furthest clock of any learner", _summary("step")),
    Metric("ddiloco_goodput_ratio", "useful chip time over allocated chip time", _summary("goodput")),
    Metric("ddiloco_uptime_ratio", "time in which any learner stepped", _summary("uptime")),
    Metric("ddiloco_merged_ratio", "tokens merged over tokens trained", _summary("merged_share")),
    Metric("ddiloco_merge_shock", "mean change of learners' loss at an update", _summary("merge_shock")),
    Metric(
        "ddiloco_merge_shock_kept_ratio",
        "updates whose loss is not made up before the next",
        _summary("merge_shock_kept"),
    ),
    Metric("ddiloco_tokens_per_second", "of all learners, since the start", _summary("tokens_per_second")),
    Metric("ddiloco_mfu_ratio", "model FLOPs utilisation", _summary("mfu")),
    Metric("ddiloco_train_loss", "nats per token", _summary("train_loss")),
    Metric(
        "ddiloco_eval_loss", "of the global model on held-out data, nats per token", _summary("eval_loss")
    ),
    Metric("ddiloco_skipped_steps_total", "steps left out as not finite", _summary("skipped_steps")),
    Metric("ddiloco_rounds_total", "merges", _syncer("rounds")),
    Metric("ddiloco_rounds_skipped_total", "left out since the syncer fell behind", _syncer("skipped")),
    Metric("ddiloco_rounds_abandoned_total", "without a quorum", _syncer("abandoned")),
    Metric("ddiloco_rounds_per_second", "merges a second, lately", _syncer("rounds_per_second")),
    Metric(
        "ddiloco_rounds_due_per_second",
        "that are due at the learners' speed",
        _syncer("due_per_second"),
    ),
    Metric("ddiloco_syncer_busy_ratio", "time spent merging and writing, lately", _syncer("busy")),
    Metric("ddiloco_syncer_merge_seconds", "of a round, the merge alone", _syncer("merge_seconds")),
    Metric("ddiloco_syncer_disk_seconds", "of a round, its write", _syncer("disk_seconds")),
    Metric("ddiloco_syncer_inbox_messages", "the most that waited, lately", _syncer("inbox")),
    Metric("ddiloco_syncer_merges_waiting", "the most at a time, lately", _syncer("merging")),
    Metric("ddiloco_syncer_in_bytes_per_second", "from all learners, lately", _syncer("in_per_second")),
    Metric("ddiloco_syncer_out_bytes_per_second", "to all learners, lately", _syncer("out_per_second")),
    Metric("ddiloco_quorum_learners", "mean of learners in a merge", _syncer("mean_quorum")),
    Metric("ddiloco_quorum_seconds", "mean time until a quorum", _syncer("quorum_seconds")),
    Metric("ddiloco_grace_seconds", "mean grace used", _syncer("grace_seconds")),
    Metric("ddiloco_sync_seconds", "mean time of a merge and its write", _syncer("sync_seconds")),
    Metric("ddiloco_records_lost_total", "of learners, lost on their way", _summary("records_lost")),
    Metric("ddiloco_alarms_total", "alarms", lambda view: len(view.summary.get("alarms") or ())),
)
OF_LEARNER = (
    Metric("ddiloco_learner_clock", "its steps", lambda one: one.clock),
    Metric("ddiloco_learner_tokens_total", "that it trained on", lambda one: one.tokens),
    Metric("ddiloco_learner_tokens_per_second", "lately", lambda one: one.tokens_per_second),
    Metric("ddiloco_learner_step_seconds", "median of its last steps", lambda one: one.step_seconds),
    Metric("ddiloco_learner_data_wait_ratio", "of its steps' time", lambda one: one.data_wait_share),
    Metric("ddiloco_learner_mfu_ratio", "model FLOPs utilisation", lambda one: one.mfu),
    Metric("ddiloco_learner_merged_ratio", "tokens merged over tokens trained", lambda one: one.merged_share),
    Metric("ddiloco_learner_in_rounds_ratio", "of the last rounds", lambda one: one.in_recent),
    Metric("ddiloco_learner_staleness_steps", "from offer to merge, lately", lambda one: one.staleness),
    Metric("ddiloco_learner_sent_bytes_total", "to the syncer", lambda one: one.sent),
    Metric("ddiloco_learner_received_bytes_total", "from the syncer", lambda one: one.received),
    Metric(
        "ddiloco_learner_hosts",
        "connected, of a learner that has several",
        lambda one: sum(at.state == "connected" for at in one.hosts) if one.hosts else None,
    ),
    Metric("ddiloco_learner_starts_total", "starts of its processes", lambda one: one.starts),
)
OF_FRAGMENT = (
    Metric("ddiloco_fragment_version", "merges of it", lambda one: one.version),
    Metric("ddiloco_fragment_age_steps", "steps since its last merge", lambda one: one.age_steps),
)
LABELLED = {
    ("cause",): Metric(
        "ddiloco_lost_ratio",
        "chip time lost, by cause",
        lambda view: {(cause,): share for cause, share in (view.summary.get("lost") or {}).items()},
    ),
    ("reason",): Metric(
        "ddiloco_drops_total",
        "messages dropped, by reason",
        lambda view: {(reason,): count for reason, count in view.syncer.drops.items()},
    ),
    ("learner", "state"): Metric(
        "ddiloco_learner_state",
        "1 for the state that it is in, by state",
        lambda view: {(one.learner, state): one.state == state for one in view.learners for state in STATES},
    ),
    ("rule", "learner"): Metric(
        "ddiloco_advice",
        "1 for each rule of the advice that applies, by rule and learner",
        lambda view: {(one.rule, "" if one.learner is None else one.learner): 1 for one in advice(view)},
    ),
}
"""Metrics with labels of their own beside `run`, and a value for each of the labels' values."""

METRICS = (*OF_RUN, *OF_LEARNER, *OF_FRAGMENT, *LABELLED.values())


def exposition(views: Sequence[RunView]) -> tuple[bytes, str]:
    """The metrics of these runs, and their content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    # `generate_latest` only calls `collect` of a registry.
    registry: Any = types.SimpleNamespace(collect=lambda: _families(views))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _families(views: Sequence[RunView]) -> Iterator[object]:
    for metric in OF_RUN:
        yield _family(views, metric, (), lambda view, of: {(): of(view)})
    for metric in OF_LEARNER:
        yield _family(
            views, metric, ("learner",), lambda view, of: {(m.learner,): of(m) for m in view.learners}
        )
    for metric in OF_FRAGMENT:
        yield _family(
            views, metric, ("fragment",), lambda view, of: {(p.fragment,): of(p) for p in view.fragments}
        )
    for labels, metric in LABELLED.items():
        yield _family(views, metric, labels, lambda view, of: of(view))


def _family(
    views: Sequence[RunView], metric: Metric, labels: Sequence[str], values: Callable[..., Any]
) -> object:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=("run", *labels))
    for view in views:
        for at, value in values(view, metric.of).items():
            if value is not None:
                family.add_metric((view.name, *map(str, at)), float(value))
    return family
