"""A run in Prometheus' format; the table of names is in docs/dashboard.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ddiloco.page.advice import advice
from ddiloco.page.view import LearnerView, RunView

STATES = ("stepping", "waiting", "recovering", "spare", "hung", "dead", "finished", "absent")


class Metric(NamedTuple):
    """A metric: its name, what it is, and its value in a view; None: not known. `_total` never falls."""

    name: str
    meaning: str
    of: Callable[..., float | None]


def _summary(name: str) -> Callable[[RunView], float | None]:
    return lambda view: view.summary.get(name)


def _syncer(name: str) -> Callable[[RunView], float | None]:
    return lambda view: getattr(view.syncer, name)


OF_RUN = (
    Metric("ddiloco_step", "global step: the furthest clock of any learner", _summary("step")),
    Metric("ddiloco_goodput_ratio", "useful chip time over allocated chip time", _summary("goodput")),
    Metric("ddiloco_uptime_ratio", "time in which any learner stepped", _summary("uptime")),
    Metric("ddiloco_merged_ratio", "tokens merged over tokens trained", _summary("merged_share")),
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
        "that are due at the learners' pace",
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
OTHERS = {
    "lost": ("ddiloco_lost_ratio", "chip time lost, by cause"),
    "drops": ("ddiloco_drops_total", "messages dropped, by reason"),
    "state": ("ddiloco_learner_state", "1 for the state that it is in, by state"),
    "advice": ("ddiloco_advice", "1 for each rule of the advice that speaks, by rule and learner"),
}
"""Metrics with a label of their own beside `run` and `learner`."""


def exposition(views: Sequence[RunView]) -> tuple[bytes, str]:
    """The metrics of these runs, and their content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(views))  # type: ignore[arg-type]  # it only has to have `collect`
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = views

    def collect(self) -> list[object]:
        views = self._views
        learners = [((view.name, str(one.learner)), one) for view in views for one in view.learners]
        fragments = [((view.name, str(one.fragment)), one) for view in views for one in view.fragments]
        runs = [((view.name,), view) for view in views]
        return [
            *(_family(metric, ("run",), runs) for metric in OF_RUN),
            *(_family(metric, ("run", "learner"), learners) for metric in OF_LEARNER),
            *(_family(metric, ("run", "fragment"), fragments) for metric in OF_FRAGMENT),
            *self._labelled(learners),
        ]

    def _labelled(self, learners: Sequence[tuple[tuple[str, str], LearnerView]]) -> Iterator[object]:
        """The metrics with a label of their own."""
        views = self._views
        said = {
            (v.name, a.rule, str("" if a.learner is None else a.learner)) for v in views for a in advice(v)
        }
        states = [((*at, state), float(one.state == state)) for at, one in learners for state in STATES]
        lost = [
            ((v.name, cause), part) for v in views for cause, part in (v.summary.get("lost") or {}).items()
        ]
        drops = [((v.name, reason), count) for v in views for reason, count in v.syncer.drops.items()]
        labels: dict[str, tuple[str, ...]] = {
            "state": ("run", "learner", "state"),
            "advice": ("run", "rule", "learner"),
            "lost": ("run", "cause"),
            "drops": ("run", "reason"),
        }
        values: dict[str, Sequence[tuple[tuple[str, ...], Any]]]
        values = {"state": states, "advice": [(at, 1.0) for at in sorted(said)], "lost": lost, "drops": drops}
        for kind, (name, meaning) in OTHERS.items():
            yield _family(Metric(name, meaning, lambda value: value), labels[kind], values[kind])


def _family(metric: Metric, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Any]]) -> object:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    made = kind(metric.name, metric.meaning, labels=labels)
    for at, of in values:
        value = metric.of(of)
        if value is not None:
            made.add_metric(at, float(value))
    return made
