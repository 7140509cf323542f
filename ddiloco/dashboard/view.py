"""A run at one moment, in plain values: the common source of page, report, metrics and advice."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddiloco.telemetry.run_files import RunFiles
from ddiloco.telemetry.series import Slots, StateSpan
from ddiloco.telemetry.state import ROUND_SECONDS, LearnerProgress

SPANS = 8192  # of all lanes together
MIN_SPANS = 48  # of a lane
SHOWN_ROUNDS = 24
RATE_SECONDS = 30.0  # that tokens a second are taken over; more where a few steps take longer

Values = Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class HostView:
    """One of a learner's several hosts, by the syncer's knowledge."""

    host: int
    state: str  # connected, gone, or finished with its learner
    state_seconds: float
    lane: Sequence[StateSpan]  # seconds since the run began


@dataclasses.dataclass(frozen=True)
class LearnerView:
    """A learner; shares are in [0, 1], None is not known."""

    learner: int
    state: str  # stepping, waiting, recovering, spare, hung, dead, finished, or absent
    state_seconds: float
    clock: int
    tokens: int
    tokens_per_second: float | None
    step_seconds: float | None
    data_wait_share: float | None
    mfu: float | None
    merged_share: float | None
    in_recent: float | None  # the share of the last rounds that it was in
    staleness: float | None  # steps that it took between its offer and the merge, lately
    sent: int  # bytes to the syncer
    received: int  # bytes from it
    starts: int  # of its processes
    quarantined: bool
    not_finite: bool  # its newest loss
    skipped_share: float  # of its last steps
    left_out: int  # offers
    overwritten: int  # times that work on a fragment was, for its age
    loss: Values  # in each slot
    merged: Values  # the share of the rounds that it was in, in each slot
    lane: Sequence[StateSpan]  # seconds since the run began
    hosts: Sequence[HostView] = ()  # of a learner that has several


@dataclasses.dataclass(frozen=True)
class FragmentView:
    """A fragment's newest version."""

    fragment: int
    version: int
    step: int  # at which it was merged
    age_steps: int
    age_seconds: float | None


@dataclasses.dataclass(frozen=True)
class RoundView:
    """A merge; seconds as in `rounds.jsonl`, `time` since the run began."""

    time: float
    step: int
    fragment: int
    version: int
    learners: Sequence[int]
    live: int
    quorum_seconds: float
    grace_seconds: float
    sync_seconds: float


@dataclasses.dataclass(frozen=True)
class SyncerView:
    """The syncer's load and its limits."""

    rounds: int
    skipped: int  # since it fell behind
    abandoned: int
    rounds_per_second: float | None  # lately, as all down to `merging`
    due_per_second: float | None  # by the learners' speed
    busy: float | None  # the share of the time that went into merging and making durable
    merge_seconds: float | None  # of a round: the merge alone, and
    disk_seconds: float | None  # its write; None: not measured, as in virtual time
    in_per_second: float | None  # bytes from all learners
    out_per_second: float | None
    inbox: int | None  # the most messages that waited
    merging: int | None  # the most merges that waited for the one under way
    mean_quorum: float | None
    mean_share: float | None  # of the present learners, in the merges
    quorum_seconds: float | None  # means over all rounds
    grace_seconds: float | None
    sync_seconds: float | None
    drops: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class EventView:
    """An alarm, or something rare; `time` None: not known when."""

    time: float | None
    text: str
    alarm: bool


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run at the moment `now`; all times are seconds since it began."""

    name: str
    status: str  # running, finished, interrupted, or stopped: without a word
    virtual: bool
    whole: bool  # all of the run's files was read; else what is here ends before `now`
    started: float  # in the time of the run's files
    now: float
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]  # versions and hardware
    learners: Sequence[LearnerView]
    fragments: Sequence[FragmentView]
    rounds: Sequence[RoundView]  # the newest first
    syncer: SyncerView
    events: Sequence[EventView]  # the newest first
    slot_seconds: float
    tokens_per_second: Values  # in each slot, as all that follow
    quorum: Values
    live: Values
    grace_seconds: Values
    quorum_seconds: Values
    sync_seconds: Values
    timing: str | None = None  # as it was set during the run, and why
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of experiments.plan

    def setting(self, path: str, default: Any = None) -> Any:
        """A setting of the run by its path, such as `sync.interval`."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value


def view_of(run: RunFiles) -> RunView:
    """The run as far as its files have been read."""
    state, summary, now = run.state, run.summary, run.now
    slots = state.slots or Slots(0.0)
    return RunView(
        name=str(run.workdir.resolve().name),
        status=_status(run),
        virtual=run.config.get("driver") == "virtual",
        whole=run.whole,
        started=run.started,
        now=now - run.started,
        summary=summary,
        config=_with_timing(run.config, state.timing.settings),
        timing=f"H {state.timing.settings['interval']} since step {state.timing.step}: {state.timing.reason}"
        if state.timing.settings
        else None,
        plan=run.plan,
        environment=run.environment,
        learners=[_learner(run, slots, number) for number in sorted(state.learners)],
        fragments=_fragments(run),
        rounds=[_round(line, run.started) for line in reversed(state.rounds.recent)][:SHOWN_ROUNDS],
        syncer=_syncer(run),
        events=_events(run),
        slot_seconds=slots.width,
        tokens_per_second=_rates(run, slots),
        quorum=slots.means("quorum", "rounds"),
        live=slots.means("live", "rounds"),
        grace_seconds=slots.means("grace_seconds", "rounds"),
        quorum_seconds=slots.means("quorum_seconds", "rounds"),
        sync_seconds=slots.means("sync_seconds", "rounds"),
    )


def _with_timing(config: Mapping[str, Any], timing: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings as they are now."""
    return {**config, "sync": {**(config.get("sync") or {}), **timing}} if timing else config


def views_of(runs: Sequence[RunFiles]) -> list[RunView]:
    """The views of the runs of one page, with distinct names."""
    return [
        dataclasses.replace(view_of(run), name=name) for run, name in zip(runs, names_of(runs), strict=True)
    ]


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The runs' names: the shortest unique ends of their paths."""
    paths = [run.workdir.resolve().parts for run in runs]
    most = max(map(len, paths), default=0)
    names: list[str] = []
    for count in range(1, most + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def read_views(workdirs: Sequence[pathlib.Path]) -> list[RunView]:
    """The runs in the workdirs, read from the beginning."""
    runs = [RunFiles(workdir) for workdir in workdirs]
    for run in runs:
        while not run.read():
            pass
    return views_of(runs)


def _status(run: RunFiles) -> str:
    if run.going_on:
        return "running"
    if run.summary.get("interrupted"):
        return "interrupted"
    return "finished" if run.summary.get("finished") else "stopped"


def _learner(run: RunFiles, slots: Slots, number: int) -> LearnerView:
    of, summary, now = run.state.learners[number], run.summary, run.now
    state, since = _state(of, now, run.going_on)
    most = max(MIN_SPANS, SPANS // sum(1 + len(one.hosts) for one in run.state.learners.values()))
    began = run.started
    lane = _since(began, of.lane.spans(now, most))
    if state == "hung" and lane:
        stood = StateSpan(lane[-1].state, lane[-1].start, max(lane[-1].start, since - began))
        lane[-1:] = [stood, StateSpan("hung", stood.end, now - began)]
    recent = [number in line.get("learners", ()) for line in run.state.rounds.recent]
    return LearnerView(
        learner=number,
        state=state,
        state_seconds=now - since,
        clock=of.clock,
        tokens=of.tokens,
        tokens_per_second=_throughput(slots, number, of, state, lane),
        step_seconds=of.step_seconds,
        data_wait_share=_of(summary, "data_wait_share_by_learner", number),
        mfu=_of(summary, "mfu_by_learner", number),
        merged_share=_of(summary, "merged_shares", number),
        in_recent=statistics.fmean(recent) if recent else None,
        staleness=statistics.fmean(of.stale) if of.stale else None,
        sent=_of(summary, "bytes_sent_by_learner", number) or 0,
        received=_of(summary, "bytes_received_by_learner", number) or 0,
        starts=of.starts,
        quarantined=number in summary.get("quarantined", ()),
        not_finite=of.not_finite,
        skipped_share=of.skipped_share,
        left_out=_of(summary, "offers_left_out", number) or 0,
        overwritten=_of(summary, "work_overwritten", number) or 0,
        loss=slots.means(("loss", number), ("losses", number)),
        merged=slots.means(("in", number), "rounds"),
        lane=lane,
        hosts=[_host(run, of, host, most) for host in sorted(of.hosts)],
    )


def _host(run: RunFiles, of: LearnerProgress, host: int, most: int) -> HostView:
    """The host's connection until its learner finished, and then that it has."""
    spans = of.hosts[host].spans(run.now, most)
    if of.lane.state == "finished":
        ends = of.lane.since
        spans = [StateSpan(state, start, min(end, ends)) for state, start, end in spans if start < ends]
        spans.append(StateSpan("finished", ends, max(ends, run.now)))
    lane = _since(run.started, spans)
    return HostView(host, lane[-1].state, lane[-1].end - lane[-1].start, lane)


def _since(moment: float, spans: Iterable[StateSpan]) -> list[StateSpan]:
    return [StateSpan(state, start - moment, end - moment) for state, start, end in spans]


def _state(of: LearnerProgress, now: float, going_on: bool) -> tuple[str, float]:
    """A learner's state and its start; `hung` if it should step and does not."""
    state = of.lane.state or "absent"
    stepped = of.stepped_at if state == "stepping" and going_on else None
    if stepped is not None and (of.silent or now - stepped > of.standstill()):
        return "hung", stepped
    return state, of.lane.since if of.lane.state else now


def _fragments(run: RunFiles) -> list[FragmentView]:
    step = max((one.clock for one in run.state.learners.values()), default=0)
    newest = run.state.rounds.newest
    count = max(int(run.summary.get("num_fragments") or 0), 1 + max(newest, default=-1))
    found = []
    for p in range(count):
        if line := newest.get(p):
            age = max(0, step - line["step"])
            found.append(FragmentView(p, line["version"], line["step"], age, run.now - line["time"]))
        else:
            found.append(FragmentView(p, 0, 0, step, None))
    return found


def _round(line: Mapping[str, Any], started: float) -> RoundView:
    known = {name: line.get(name) or 0 for name in ("step", "fragment", "version", "live", *ROUND_SECONDS)}
    return RoundView(time=line["time"] - started, learners=list(line.get("learners", ())), **known)


def _syncer(run: RunFiles) -> SyncerView:
    summary, rounds = run.summary, run.state.rounds
    lately = [line["time"] for line in rounds.recent]
    span = lately[-1] - lately[0] if len(lately) > 1 else 0.0
    last = list(rounds.recent)[1:]  # with all of their work in the span
    merges, writes = (_known(last, name) for name in ("merge_seconds", "disk_seconds"))
    spent = sum(merges) + sum(writes) if merges else sum(_known(last, "sync_seconds"))
    return SyncerView(
        rounds=rounds.recorded,
        skipped=summary.get("rounds_skipped") or 0,
        abandoned=summary.get("rounds_abandoned") or 0,
        rounds_per_second=(len(lately) - 1) / span if span else None,
        due_per_second=_due(run),
        busy=spent / span if span else None,
        merge_seconds=statistics.fmean(merges) if merges else None,
        disk_seconds=statistics.fmean(writes) if writes else None,
        in_per_second=_rate_of(rounds.recent, "bytes_sent", span),
        out_per_second=_rate_of(rounds.recent, "bytes_received", span),
        inbox=max(map(int, _known(last, "inbox")), default=None),
        merging=max(map(int, _known(last, "merging")), default=None),
        mean_quorum=rounds.mean_quorum(),
        mean_share=rounds.mean_share(),
        drops=summary.get("drops") or {},
        **{name: rounds.mean_seconds(name) for name in ROUND_SECONDS},
    )


def _known(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _rate_of(lines: Iterable[Mapping[str, Any]], name: str, span: float) -> float | None:
    """Increase of a count in a second."""
    counts = _known(lines, name)
    return (counts[-1] - counts[0]) / span if counts and span else None


def _due(run: RunFiles) -> float | None:
    """Rounds a second that are due at the speed of the fastest learner."""
    sync = _with_timing(run.config, run.state.timing.settings).get("sync") or {}
    step_times = [one.step_seconds for one in run.state.learners.values() if one.step_seconds]
    if not step_times or not sync.get("interval"):
        return None
    return sync["num_fragments"] / (sync["interval"] * min(step_times))


def _events(run: RunFiles) -> list[EventView]:
    found = [
        EventView(line["time"] - run.started, _text(line), line.get("event") in ("alarm", "died"))
        for line in run.state.events
    ]
    shown = {event.text for event in found}
    late = [EventView(None, text, True) for text in run.summary.get("alarms", ()) if text not in shown]
    return [*late, *reversed(found)]


def _text(line: Mapping[str, Any]) -> str:
    match line.get("event"):
        case "alarm":
            return str(line.get("alarm"))
        case "died":
            return f"learner {line.get('learner')} died: {line.get('reason')}"
        case name:
            others = [f"{key} {value}" for key, value in line.items() if key not in _SHOWN_ELSEWHERE]
            return f"{_WORDS.get(str(name), str(name))}{': ' if others else ''}{', '.join(others)}"


_SHOWN_ELSEWHERE = ("time", "event", "incarnation")
_WORDS = {
    "timing_set": "the timing changes",
    "timing_effect": "since the timing changed, by a rough estimate of the loss",
    "learner_ready": "a learner takes part",
    "learner_lost": "a learner is lost",
    "learner_silent": "a learner is silent",
    "learner_returned": "a learner sends messages again",
    "report_kept_back": "a learner's clock is further than the others confirm",
    "round_refused": "nothing came of a merge",
    "guard_quarantined": "a learner is in quarantine",
    "guard_released": "a learner is out of quarantine",
    "host_here": "a host of a learner is connected",
    "host_gone": "a host of a learner is not connected any more",
    "records_lost": "records were lost on their way, of which figures and curves have nothing",
    "snapshot": "a snapshot is complete",
    "snapshot_given_up": "a snapshot was given up",
}


def _throughput(
    slots: Slots, number: int, of: LearnerProgress, state: str, lane: Sequence[StateSpan]
) -> float | None:
    """Tokens a second lately; of a learner that has finished, while it stepped."""
    if state == "finished":
        stepped = sum(span.end - span.start for span in lane if span.state == "stepping")
        return of.tokens / stepped if stepped else None
    sums = slots.sums(("tokens", number))
    whole = sums[:-1] or sums  # the last slot is not over yet
    span = max(RATE_SECONDS, 4 * (of.step_seconds or 0.0))
    recent = whole[-max(1, round(span / slots.width)) :]
    return sum(recent) / (len(recent) * slots.width) if recent else None


def _rates(run: RunFiles, slots: Slots) -> Values:
    """Tokens a second of all learners in each slot that is over, as means over a few steps."""
    steps = [one.step_seconds for one in run.state.learners.values() if one.step_seconds]
    count = max(1, round(2 * max(steps, default=0.0) / slots.width))
    over = slots.sums("tokens")[: int((run.now - run.started) / slots.width)]
    spans = [over[max(0, place + 1 - count) : place + 1] for place in range(len(over))]
    rates: list[float | None] = [sum(span) / (len(span) * slots.width) for span in spans]
    return rates + [None] * (slots.used - len(over))


def _of(summary: Mapping[str, Any], name: str, number: int) -> Any:
    """The learner's entry of a mapping in `summary.json`, whose keys are strings."""
    return (summary.get(name) or {}).get(str(number))
