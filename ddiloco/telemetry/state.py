"""The state of a run, folded from its records: for summary, progress line, figures, page and report.

    threads --records--> monitor --> RunState --> summary.json, progress line, loss.png, metrics
                            |--> RunLines --> *.jsonl --> RunFiles --> RunState --> view --> page, report

A process that resumes a run folds its files first.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.protocol.policy import TOO_OLD
from ddiloco.telemetry.merge_shock import MergeShock, merge_shock
from ddiloco.telemetry.records import (
    LOST,
    READY,
    Alarm,
    Evaluated,
    LearnerDied,
    Noted,
    Record,
    Resumed,
    RunInfo,
    StateChanged,
    StepDone,
    Transferred,
    event_line,
)
from ddiloco.telemetry.scalars import as_float, as_json
from ddiloco.telemetry.series import Curve, Lane, Performance, Slots, performance_summary
from ddiloco.telemetry.terminal import printable
from ddiloco.telemetry.timing import TimingLog

SETTLED = 4
"""Rounds of each fragment before anything is said of what is merged of whose work."""

MAX_REASONS = 200  # that are counted each by itself
MAX_FAILURES = 50  # tracebacks kept
MAX_EVENTS = 200
OTHERS = "others"
RECENT_STEPS = 32  # of a learner, for its share of skipped ones
RECENT_ROUNDS = 64
STANDSTILL = 10.0  # steps without a step
MIN_STANDSTILL = 5.0  # seconds

# The protocol's records that are only counted, with the summary's field for the count.
_COUNTED = {
    "round_skipped": "rounds_skipped",
    "round_abandoned": "rounds_abandoned",
    "snapshot": "snapshots",
    "snapshot_given_up": "snapshots_given_up",
}
SKIPPED, RECORDS_LOST = "skipped_steps", "records_lost"
COUNTS = (SKIPPED, RECORDS_LOST, "bytes_sent", "bytes_received", *_COUNTED.values())

KIND = {
    State.STARTING: "recovering",
    State.STEPPING: "stepping",
    State.SKIPPING: "stepping",
    State.WAITING_FOR_PEERS: "waiting",
    State.WAITING_FOR_NETWORK: "waiting",
    State.DETECTING: "recovering",
    State.RECONFIGURING: "recovering",
    State.REPLAYING: "recovering",
    State.STANDBY: "spare",
    State.FAILED: "dead",
    State.FINISHED: "finished",
}
"""What a learner's lane shows, by its state."""

HOST_KIND = {"host_here": "connected", "host_gone": "gone"}
"""What the lane of a host shows, by the event."""

ROUND_SECONDS = ("quorum_seconds", "grace_seconds", "sync_seconds")


def _recent(length: int) -> Any:
    return dataclasses.field(default_factory=lambda: collections.deque(maxlen=length))


@dataclasses.dataclass
class LearnerProgress:
    """Progress of one learner."""

    steps: int = 0
    tokens: int = 0
    clock: int = 0
    loss: Curve = dataclasses.field(default_factory=Curve)
    performance: Performance = dataclasses.field(default_factory=Performance)
    shock: MergeShock = dataclasses.field(default_factory=MergeShock)
    skips: collections.deque[bool] = _recent(RECENT_STEPS)  # whether the last steps were skipped
    gaps: collections.deque[float] = _recent(33)  # seconds from the end of a step to that of the next
    stale: collections.deque[int] = _recent(RECENT_ROUNDS)  # steps from an offer to its merge
    stepped_at: float | None = None  # None: it does not step
    last_seen: float = -math.inf  # its last step or change of state
    changed_at: float = -math.inf  # its last change of state
    not_finite: bool = False  # the newest loss
    epsilon: float | None = None  # of its steps so far, as a loop with differential privacy reports it
    silent: bool = False  # no message for the silence timeout
    starts: int = 0  # of its processes
    lane: Lane = dataclasses.field(default_factory=Lane)
    hosts: dict[int, Lane] = dataclasses.field(default_factory=dict)  # of a learner of several: see HOST_KIND

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps, from end to end."""
        return statistics.median(self.gaps) if self.gaps else None

    @property
    def skipped_share(self) -> float:
        """What was skipped of the last steps."""
        return sum(self.skips) / max(1, len(self.skips))

    def standstill(self) -> float:
        """Seconds without a step after which it has hung."""
        return max(MIN_STANDSTILL, STANDSTILL * (self.step_seconds or math.inf))

    def stood_still(self, moment: float) -> None:
        """It has taken no step until then: if that is too long, it had hung."""
        waited = 0.0 if self.stepped_at is None else moment - self.stepped_at
        if waited > MIN_STANDSTILL and waited > self.standstill():
            self.lane.hung(moment - waited, moment)


class RoundStats:
    """Counts and means over the merges of a run, and the last ones."""

    def __init__(self) -> None:
        self.by_fragment: collections.Counter[int] = collections.Counter()  # versions
        self.quorums: collections.Counter[int] = collections.Counter()  # rounds, by the learners in them
        self.live = 0  # learners that were there, over all rounds
        self.merged_tokens: collections.Counter[int] = collections.Counter()  # by learner, of all fragments
        self.left_out: collections.Counter[int] = collections.Counter()  # offers, by learner
        self.seconds = dict.fromkeys(ROUND_SECONDS, 0.0)  # of all rounds
        self.recent: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=RECENT_ROUNDS)
        self.newest: dict[int, Mapping[str, Any]] = {}  # by fragment

    @property
    def count(self) -> int:
        """The merges so far."""
        return self.by_fragment.total()

    @property
    def recorded(self) -> int:
        """The recorded ones among them."""
        return self.quorums.total()

    def add(self, line: Mapping[str, Any]) -> None:
        """Counts one merge, as `rounds.jsonl` has it."""
        fragment, quorum = int(line["fragment"]), int(line["quorum"])
        # Each version was a merge; a shard may report a durable one late, or never.
        version = int(line.get("version", self.by_fragment[fragment] + 1))
        self.by_fragment[fragment] = max(version, self.by_fragment[fragment])
        self.quorums[quorum] += 1
        self.live += line.get("live", 0)
        for name in ROUND_SECONDS:
            self.seconds[name] += as_float(line.get(name) or 0.0)
        self.left_out.update(line.get("left_out", ()))
        for learner, *_, tokens in line.get("contributions") or ():
            self.merged_tokens[learner] += tokens
        self.recent.append(line)
        self.newest[fragment] = line

    def mean_quorum(self) -> float | None:
        """Learners in a merge on average; None before the first."""
        return sum(size * n for size, n in self.quorums.items()) / self.recorded if self.recorded else None

    def mean_share(self) -> float | None:
        """Mean share of the present learners in a merge; None: unknown."""
        return sum(size * n for size, n in self.quorums.items()) / self.live if self.live else None

    def mean_seconds(self, name: str) -> float | None:
        """Mean seconds of a round's parts, by ROUND_SECONDS; None before the first."""
        return self.seconds[name] / self.recorded if self.recorded else None


class RunState:
    """The state of a run according to its records. Used by one thread; reads no clock."""

    def __init__(self, info: RunInfo, started: float | None = None) -> None:
        """`started` is the moment from which the run's seconds count; None: the first record's time."""
        self.info = info
        self.started = started
        self.last_time = -math.inf if started is None else started
        self.timelines = Timelines(info.chips_by_learner)
        self.rounds = RoundStats()
        self.timing = TimingLog()
        self.step = 0  # the global step: the furthest clock of any learner
        self.learners = {m: LearnerProgress() for m in info.chips_by_learner if m < info.num_learners}
        self.counts = collections.Counter(dict.fromkeys(COUNTS, 0))
        self.sent_by_learner: collections.Counter[int] = collections.Counter()  # bytes
        self.received_by_learner: collections.Counter[int] = collections.Counter()
        self.evaluations: list[Evaluated] = []
        self.drops: collections.Counter[str] = collections.Counter()
        self.overwritten: collections.Counter[int] = collections.Counter()  # times, by learner
        self.inner_states: collections.Counter[str] = collections.Counter()  # by source
        self.failures: list[LearnerDied] = []
        self.events: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_EVENTS)
        self.marks: list[tuple[int, int, bool]] = []  # step, learner, whether it rejoined (else it left)
        self.finished: set[int] = set()
        self.away: set[int] = set()  # dead, lost or silent
        self.quarantined: set[int] = set()  # by the guard
        self.slots: Slots | None = None  # sums over time, from the first step or change of state on
        self._recent: collections.deque[float] = collections.deque(maxlen=10 * max(1, info.num_learners))

    # Records.

    def apply(self, record: Record) -> None:
        """Applies a record; an unknown one of the protocol changes nothing."""
        match record:
            case StepDone():
                self._seen(record.time)
                self._step_done(record)
                return
            case StateChanged():
                self._seen(record.time)
                self._state_changed(record)
            case Noted():
                self._seen(record.time)
                self._noted(record)
            case Transferred():
                self._transferred(record)
            case Evaluated():
                self._seen(record.time)
                self.evaluations.append(record)
            case LearnerDied():
                self._seen(record.time)
                self.failures.append(record)
                del self.failures[:-MAX_FAILURES]
                self._mark(record.learner, record.time, rejoined=False)
            case Resumed():  # each version was a merge, though a crash may have lost its line
                self.rounds.by_fragment = collections.Counter(dict(enumerate(record.versions)))
            case Alarm():
                self.last_time = max(self.last_time, record.time)
            case _:
                raise TypeError("it is no record of a run")
        if (line := event_line(record)) is not None:
            self.events.append(line)

    def learner(self, number: int) -> LearnerProgress:
        """The state of this learner, which is known from now on."""
        if number not in self.learners:
            self.learners[number] = LearnerProgress()
        return self.learners[number]

    def recall(self, summary: Mapping[str, Any]) -> None:
        """Adds an earlier process's figures of which its files have no lines; those were applied before.

        Learners that were connected when that process ended count as away since, until their next record.
        """
        for number, learner in self.learners.items():
            if number not in self.away | self.finished and learner.last_seen > -math.inf:
                self.timelines.away(number, learner.last_seen)
        self.quarantined.clear()  # the guard begins anew
        for name in COUNTS:
            if name != SKIPPED:
                self.counts[name] = max(self.counts[name], int(summary.get(name, 0)))
        for name, known in (("sent", self.sent_by_learner), ("received", self.received_by_learner)):
            counted = summary.get(f"bytes_{name}_by_learner", {})
            known.update({int(m): count for m, count in counted.items()})
        self.drops.update(summary.get("drops", {}))
        self.overwritten.update({int(m): n for m, n in summary.get("work_overwritten", {}).items()})
        # Lines of rounds have no offers of those that made no version.
        left_out = {int(m): count for m, count in summary.get("offers_left_out", {}).items()}
        self.rounds.left_out |= collections.Counter(left_out)
        self.failures = [LearnerDied(**death) for death in summary.get("failures", [])]
        for score in summary.get("eval_history", []):
            values: dict[str, Any] = {n: math.nan if value is None else value for n, value in score.items()}
            moment = (self.started or 0.0) + values.pop("seconds")
            step, tokens, loss = (values.pop(name) for name in ("step", "tokens", "loss"))
            self.evaluations.append(Evaluated(step, tokens, moment, loss, values))

    def _seen(self, time: float) -> None:
        """Something was recorded at this time, other than what is wrong."""
        if self.started is None:
            self.started = time
        if time > self.last_time:
            self.last_time = time

    def _step_done(self, record: StepDone) -> None:
        """Counts a step and keeps its loss; one that was skipped has none, nor tokens."""
        number, time, tokens = record.learner, record.time, record.tokens
        learner, slots, skipped = self.learner(number), self._slots(time), record.skipped
        if record.step > learner.clock:
            learner.clock = record.step
            self.step = max(self.step, min(record.step, self.info.total_steps))
        learner.steps += 1
        learner.tokens += tokens
        if learner.stepped_at is not None:
            learner.stood_still(time)
            learner.gaps.append(time - learner.stepped_at)
        learner.stepped_at = learner.last_seen = time
        learner.skips.append(skipped)
        learner.performance.add(record.metrics)
        if "epsilon" in record.metrics:
            learner.epsilon = as_float(record.metrics["epsilon"])
        sums: dict[Any, float] = {("tokens", number): tokens, "tokens": tokens}
        # The time of a skipped step is lost; a baseline is one job, reported by learner 0.
        ended = max(time, learner.changed_at)
        if self.info.num_fragments:
            self.timelines.step_ended(number, ended, skipped)
        else:
            self.timelines.job_step_ended(ended, skipped)
        self.counts[SKIPPED] += skipped
        if "loss" in record.metrics:
            loss = as_float(record.metrics["loss"])
            learner.not_finite = not math.isfinite(loss)
            learner.shock.add(math.nan if skipped else loss, "updates" in record.metrics)
            if not skipped:
                learner.loss.add(record.step, loss)
                self._recent.append(loss)
                if not learner.not_finite:
                    sums |= {("loss", number): loss, ("losses", number): 1}
        slots.add(time, sums)

    def _state_changed(self, record: StateChanged) -> None:
        """Enters the state; if a clock was set back, from the time of the learner's last change."""
        number, state = record.learner, record.state
        learner = self.learner(number)
        self._slots(record.time)
        time = max(record.time, learner.changed_at)
        if number in self.info.chips_by_learner:
            self.timelines.enter(number, state, time, record.chips)
        learner.changed_at = learner.last_seen = time
        if state is State.FAILED:
            learner.stood_still(record.time)
        # To a restarted syncer all learners seem to start, also those that step on.
        learner.starts += state is State.STARTING and learner.lane.state not in ("stepping", "waiting")
        learner.lane.enter(KIND[state], record.time)
        if state is not State.STEPPING:
            learner.stepped_at = None
        (self.finished.add if state is State.FINISHED else self.finished.discard)(number)
        if state is State.FAILED:
            self._mark(number, record.time, rejoined=False)

    def _noted(self, record: Noted) -> None:
        values, name = record.values, record.name
        match name:
            case "round":
                self._round(record)
            case "timing_set":
                self.timing.set(values)
            case "round_refused":
                self.rounds.left_out.update(values["left_out"])
            case "drop":
                _count(self.drops, values.get("reason", "unknown"))
                if values.get("reason") == TOO_OLD:
                    self.overwritten[int(values["learner"])] += 1
            case "recovered":
                _count(self.inner_states, values.get("inner_state", "unknown"))
            case _ if name in LOST + READY:
                number = int(values["learner"])
                self._mark(number, record.time, rejoined=name in READY)
                if number in self.learners and name != "learner_lost":
                    self.learners[number].silent = name == "learner_silent"
            case _ if name in HOST_KIND:
                self._host(record)
            case "guard_quarantined":
                self.quarantined.add(values["learner"])
            case "guard_released":
                self.quarantined.discard(values["learner"])
            case "records_lost":
                self.counts[RECORDS_LOST] += int(values["count"])
            case _ if name in _COUNTED:
                self.counts[_COUNTED[name]] += 1

    def _round(self, record: Noted) -> None:
        time, moved = record.time, {name: self.counts[name] for name in ("bytes_sent", "bytes_received")}
        line = {**moved, **record.values, "time": time}
        self.rounds.add(line)
        sums: dict[Any, float] = {"rounds": 1, "live": line.get("live", 0)}
        sums["quorum"] = len(line.get("learners", ()))
        sums |= {name: as_float(line.get(name) or 0.0) for name in ROUND_SECONDS}
        tokens = work = aged = 0
        for number, _, _, clock, steps, of_it in line.get("contributions") or ():
            sums["in", number] = 1
            if number in self.learners:
                learner = self.learners[number]
                age = max(0, learner.clock - clock)
                learner.stale.append(age)
                tokens, work, aged = tokens + of_it, work + of_it * steps, aged + of_it * age
        if tokens:
            share = sums["quorum"] / max(1, line.get("live", 0))
            gained = self.timing.add(work / tokens, aged / tokens, min(1.0, share))
            if gained is not None:
                self.events.append({"time": time, "event": "timing_effect", **gained})
        self._slots(time).add(time, sums)

    def _host(self, record: Noted) -> None:
        """A host may be connected before its learner has any other record."""
        values, time = record.values, record.time
        known = self.learner(int(values["learner"])).hosts
        if record.name == "host_here":
            hosts = set(range(int(values["hosts"])))
            for host in known.keys() - hosts:  # it has come back with fewer
                del known[host]
            for host in hosts - known.keys():
                known[host] = Lane()
                known[host].enter("gone", time)
        if (lane := known.get(int(values["host"]))) is not None:
            lane.enter(HOST_KIND[record.name], time)

    def _transferred(self, record: Transferred) -> None:
        self.counts.update(bytes_sent=record.sent, bytes_received=record.received)
        self.sent_by_learner[record.learner] += record.sent
        self.received_by_learner[record.learner] += record.received

    def _mark(self, learner: int, time: float, rejoined: bool) -> None:
        """Keeps each departure and each rejoining once, though several records may report it."""
        if rejoined is not (learner in self.away) or learner in self.finished:
            return
        (self.away.discard if rejoined else self.away.add)(learner)
        self.timelines.away(learner, math.inf if rejoined else time)
        clock = self.learners[learner].clock if learner in self.learners else 0
        self.marks.append((max(clock, self.step if rejoined else 0), learner, rejoined))

    def _slots(self, time: float) -> Slots:
        if self.slots is None:
            self.slots = Slots(time)
        return self.slots

    # Results.

    @property
    def tokens(self) -> int:
        """Tokens of all learners so far."""
        return sum(learner.tokens for learner in self.learners.values())

    def taking_part(self) -> dict[int, LearnerProgress]:
        """The first learners, and those that have taken a step."""
        first = self.info.num_learners
        return {
            m: learner
            for m, learner in self.learners.items()
            if learner.steps or (m < first and m in self.info.chips_by_learner)
        }

    def merged_shares(self) -> dict[int, float]:
        """By learner that has trained: the share of its tokens that was merged, averaged over fragments.

        What was trained since a fragment's last round is in none yet, nor is what was done between an offer
        and its update unless the learner rebases. Empty where nothing is merged.
        """
        merged, fragments = self.rounds.merged_tokens, max(1, self.info.num_fragments)
        trained = {m: learner.tokens for m, learner in self.learners.items() if learner.tokens}
        return {m: merged[m] / (fragments * tokens) for m, tokens in trained.items()} if merged else {}

    def merged_share(self) -> float | None:
        """The same of all learners together; None where nothing is merged."""
        merged, fragments = self.rounds.merged_tokens.total(), max(1, self.info.num_fragments)
        return merged / (fragments * self.tokens) if merged and self.tokens else None

    def left_out(self) -> dict[int, float]:
        """The merged shares of present learners that train in vain."""
        settled = min(self.rounds.by_fragment.values(), default=0) >= SETTLED
        if not settled or len(self.rounds.by_fragment) != self.info.num_fragments:
            return {}
        shares = {m: share for m, share in self.merged_shares().items() if m not in self.away}
        return trained_in_vain(shares, {m: learner.steps for m, learner in self.learners.items()})

    @property
    def recent_loss(self) -> float | None:
        """The mean of about ten last losses of each learner; the last loss itself if it is not finite."""
        if not self._recent or not math.isfinite(self._recent[-1]):
            return self._recent[-1] if self._recent else None
        return statistics.fmean(filter(math.isfinite, self._recent))

    @property
    def skipped_share(self) -> float:
        """What the learners that are there have skipped of their last steps."""
        present = [learner.skips for m, learner in self.learners.items() if m not in self.away]
        return sum(map(sum, present)) / max(1, sum(map(len, present)))

    def unfinished(self) -> list[int]:
        """Learners that take part and have not ended."""
        return sorted(self.taking_part().keys() - self.finished - self.away)

    def train_loss(self) -> float | None:
        """The mean over learners of the mean loss of the last 5% of their steps; None if there is none.

        Without learners that left before the last 5% of the run's steps: theirs are of an early model.
        """
        absent = self.away | self.finished | (self.learners.keys() - self.info.chips_by_learner.keys())
        losses = [
            learner.loss.tail_mean(0.05)
            for m, learner in self.learners.items()
            if learner.loss and (m not in absent or learner.clock >= 0.95 * self.step)
        ]
        return statistics.fmean(losses) if losses else None


def trained_in_vain(shares: Mapping[int, float], steps: Mapping[int, int]) -> dict[int, float]:
    """The shares of learners of whose work less than half as much is merged as of the others'.

    Args:
      shares: by learner that is there, what of its work is merged.
      steps: by learner; one with a quarter of the most has not been there for long.
    """
    if len(shares) < 2:
        return {}
    median, longest = statistics.median(shares.values()), max(steps.values())
    return {m: share for m, share in shares.items() if share < median / 2 and 4 * steps[m] >= longest}


def _count(counts: collections.Counter[str], reason: object) -> None:
    """Counts a reason that may be a stranger's words."""
    text = printable(str(reason), 200)
    counts[text if text in counts or len(counts) < MAX_REASONS else OTHERS] += 1


def summarize(state: RunState, now: float, alarms: list[str]) -> dict[str, Any]:
    """What `summary.json` has as of `now` (the records' clock), ready for JSON: None is NaN, or not known.

    Seconds count from the start of the run; tokens a second are taken over the window of
    `ddiloco.goodput.accounting`, so that compilation before the first step does not dilute them.
    Bytes are from the learners' point of view. Losses are nats per token.
    """
    lines, rounds, info = state.timelines, state.rounds, state.info
    learners = state.taking_part()
    started = now if state.started is None else state.started
    window = lines.window(now)
    begun, ended = window or (started, now)
    seconds = ended - begun
    last = state.evaluations[-1] if state.evaluations else None
    values = {
        "algorithm": info.algorithm,
        "seed": info.seed,
        "num_learners": info.num_learners,
        "num_params": info.num_params,
        "num_fragments": info.num_fragments,
        "total_steps": info.total_steps,
        "step": state.step,
        "inner_steps": {m: learner.steps for m, learner in learners.items()},
        "tokens": {m: learner.tokens for m, learner in learners.items()},
        "tokens_per_second": state.tokens / seconds if seconds > 0 else None,
        "started": started,
        "wall_seconds": now - started,
        **performance_summary({m: learner.performance for m, learner in learners.items()}),
        "train_loss": state.train_loss(),
        "eval_loss": last.loss if last else None,
        **({f"eval_{name}": value for name, value in last.statistics.items()} if last else {}),
        **_privacy(learners),
        "eval_history": [_evaluation(record, started) for record in state.evaluations],
        "rounds": rounds.count,
        "outer_steps": {f: rounds.by_fragment[f] for f in {*range(info.num_fragments), *rounds.by_fragment}},
        "mean_quorum": rounds.mean_quorum(),
        "min_quorum": min(rounds.quorums, default=None),
        "max_quorum": max(rounds.quorums, default=None),
        "merged_share": state.merged_share(),
        "merged_shares": state.merged_shares(),
        **merge_shock(learner.shock for learner in state.learners.values()),
        "timing": state.timing.settings or None,
        "mean_grace_seconds": rounds.mean_seconds("grace_seconds"),
        "goodput": lines.goodput(now) if window else None,
        "uptime": lines.uptime(now) if window else None,
        "lost": lines.lost(now) if window else {},
        "learner_blocked_seconds": lines.blocked_seconds(now),
        **state.counts,
        "bytes_sent_by_learner": dict(sorted(state.sent_by_learner.items())),
        "bytes_received_by_learner": dict(sorted(state.received_by_learner.items())),
        "inner_states": dict(sorted(state.inner_states.items())),
        "drops": dict(sorted(state.drops.items())),
        "work_overwritten": dict(sorted(state.overwritten.items())),
        "offers_left_out": dict(sorted(rounds.left_out.items())),
        "quarantined": sorted(state.quarantined),
        "failures": [dataclasses.asdict(death) for death in state.failures],
        "alarms": alarms,
        "params_sha256": None,
        "finished": False,  # until the run ends, with everything saved
        "interrupted": False,
    }
    return as_json(values)


def _privacy(learners: Mapping[int, LearnerProgress]) -> dict[str, Any]:
    """Epsilon of the run and by learner, where loops report it; no row of data is on two learners."""
    known = {m: one.epsilon for m, one in learners.items() if one.epsilon is not None}
    return {"epsilon": max(known.values()), "epsilon_by_learner": known} if known else {}


def _evaluation(record: Evaluated, started: float) -> dict[str, Any]:
    return {
        "step": record.step,
        "tokens": record.tokens,
        "seconds": record.time - started,
        "loss": record.loss,
        **record.statistics,
    }
