"""What the records of a run add up to: the source of summary, progress line and plot."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.observe import performance
from ddiloco.observe.curves import Curve
from ddiloco.observe.performance import Performance
from ddiloco.observe.records import (
    Evaluated,
    LearnerDied,
    Noted,
    RunInfo,
    StateChanged,
    StepDone,
    Transferred,
)
from ddiloco.observe.scalars import as_float, as_json
from ddiloco.observe.terminal import printable

# The protocol's records that are only counted, with the summary's field for the count.
_COUNTED = {
    "round_skipped": "rounds_skipped",
    "round_abandoned": "rounds_abandoned",
    "snapshot": "snapshots",
    "snapshot_given_up": "snapshots_given_up",
}
# The events by which a learner is away, and there again.
LOST, READY = ("learner_lost", "learner_silent", "died"), ("learner_ready", "learner_returned")
SETTLED = 4
"""Rounds of each fragment before anything is said of what is merged of whose work."""

MOST_REASONS = 200  # that are counted each by itself
MOST_FAILURES = 50  # deaths whose tracebacks are kept
OTHERS = "others"
RECENT_STEPS = 32  # of a learner, of which it is said how many were skipped

SKIPPED, RECORDS_LOST = "skipped_steps", "records_lost"
COUNTS = (SKIPPED, RECORDS_LOST, "bytes_sent", "bytes_received", *_COUNTED.values())


class Rounds:
    """Counts and means over the merges of a run."""

    def __init__(self) -> None:
        self.by_fragment: collections.Counter[int] = collections.Counter()
        self.quorums: collections.Counter[int] = collections.Counter()
        self.merged_tokens: collections.Counter[int] = collections.Counter()  # by learner, of all fragments
        self.left_out: collections.Counter[int] = collections.Counter()  # offers, by learner
        self.grace_seconds = 0.0
        self.last_quorum: int | None = None
        self.last_grace_seconds: float | None = None

    @property
    def count(self) -> int:
        """The merges so far."""
        return self.by_fragment.total()

    def add(self, record: Noted) -> None:
        """Counts one merge."""
        fragment, quorum = int(record.values["fragment"]), int(record.values["quorum"])
        self.last_quorum = quorum
        self.last_grace_seconds = as_float(record.values.get("grace_seconds", 0.0))
        # Each version was a merge; a part may tell late of one that was durable, or never.
        version = int(record.values.get("version", self.by_fragment[fragment] + 1))
        self.by_fragment[fragment] = max(version, self.by_fragment[fragment])
        self.quorums[quorum] += 1
        self.grace_seconds += self.last_grace_seconds
        self.left_out.update(record.values.get("left_out", ()))
        for learner, *_, tokens in record.values.get("contributions", ()):
            self.merged_tokens[learner] += tokens

    def resumed(self, versions: tuple[int, ...]) -> None:
        """Corrects the counts: each version was a merge, though a crash may have lost its line."""
        self.by_fragment = collections.Counter(dict(enumerate(versions)))

    def mean_quorum(self) -> float | None:
        """Learners in a merge on average; None before the first."""
        known = self.quorums.total()
        return sum(size * n for size, n in self.quorums.items()) / known if known else None

    def mean_grace_seconds(self) -> float | None:
        """How long a merge waited in its grace window on average; None before the first."""
        known = self.quorums.total()
        return self.grace_seconds / known if known else None


class Tally:
    """The state of a run according to its records. Used by one thread; reads no clock."""

    def __init__(self, info: RunInfo, started: float | None) -> None:
        """`started` is the moment from which the run's seconds count; None: the first record's time."""
        self.info = info
        self.started = started
        self.last_time = -math.inf if started is None else started
        self.timelines = Timelines(info.chips_by_learner)
        self.rounds = Rounds()
        self.step = 0  # the global step: the furthest clock of any learner
        first = [m for m in info.chips_by_learner if m < info.num_learners]
        self.steps_by_learner = dict.fromkeys(first, 0)
        self.tokens_by_learner = dict.fromkeys(first, 0)
        self.loss_curves: dict[int, Curve] = {}
        self.performance: dict[int, Performance] = {m: Performance() for m in first}
        self.counts = collections.Counter(dict.fromkeys(COUNTS, 0))
        self.sent_by_learner: collections.Counter[int] = collections.Counter()  # bytes
        self.received_by_learner: collections.Counter[int] = collections.Counter()
        self.evaluations: list[Evaluated] = []
        self.drops: collections.Counter[str] = collections.Counter()
        self.inner_states: collections.Counter[str] = collections.Counter()  # by source
        self.failures: list[LearnerDied] = []
        self.marks: list[tuple[int, int, bool]] = []  # step, learner, whether it rejoined (else it left)
        self.finished: set[int] = set()
        self.away: set[int] = set()  # dead, lost or silent
        self.quarantined: set[int] = set()  # by the guard
        self._recent: collections.deque[float] = collections.deque(maxlen=10 * info.num_learners)
        self._clocks: dict[int, int] = {}
        self._skips: dict[
            int, collections.deque[bool]
        ] = {}  # by learner, whether its last steps were skipped
        self._last_change: dict[int, float] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all learners so far."""
        return sum(self.tokens_by_learner.values())

    def merged_shares(self) -> dict[int, float]:
        """By learner that has trained: the share of its tokens that was merged, averaged over fragments.

        What was trained since a fragment's last round is in none yet, nor is what was done between an offer
        and its update unless the learner rebases. Empty where nothing is merged.
        """
        merged, fragments = self.rounds.merged_tokens, max(1, self.info.num_fragments)
        trained = {m: tokens for m, tokens in self.tokens_by_learner.items() if tokens}
        return {m: merged[m] / (fragments * tokens) for m, tokens in trained.items()} if merged else {}

    def merged_share(self) -> float | None:
        """The same of all learners together; None where nothing is merged."""
        merged, fragments = self.rounds.merged_tokens.total(), max(1, self.info.num_fragments)
        return merged / (fragments * self.tokens) if merged and self.tokens else None

    def left_out(self) -> dict[int, float]:
        """The shares of learners that are there and train in vain."""
        settled = min(self.rounds.by_fragment.values(), default=0) >= SETTLED
        whole = len(self.rounds.by_fragment) == self.info.num_fragments
        shares = {m: share for m, share in self.merged_shares().items() if m not in self.away}
        return trained_in_vain(shares, self.steps_by_learner) if settled and whole else {}

    @property
    def recent_loss(self) -> float | None:
        """The mean of about ten last losses of each learner; the last loss itself if it is not finite."""
        if not self._recent or not math.isfinite(self._recent[-1]):
            return self._recent[-1] if self._recent else None
        return statistics.fmean(filter(math.isfinite, self._recent))

    def seen(self, time: float) -> None:
        """A record of this time has come."""
        self.started = time if self.started is None else self.started
        self.last_time = max(self.last_time, time)

    def step_done(self, record: StepDone) -> float | None:
        """Counts a step and keeps its loss, which it returns; one that was skipped has none, nor tokens."""
        learner = record.learner
        self.step = max(self.step, min(record.step, self.info.total_steps))
        self._clocks[learner] = record.step
        self.steps_by_learner[learner] = self.steps_by_learner.get(learner, 0) + 1
        self.tokens_by_learner[learner] = self.tokens_by_learner.get(learner, 0) + record.tokens
        self.performance.setdefault(learner, Performance()).add(record.metrics)
        self._step_ended(record)
        if record.skipped:
            self.counts[SKIPPED] += 1
            return None
        if "loss" not in record.metrics:
            return None
        loss = as_float(record.metrics["loss"])
        self.loss_curves.setdefault(learner, Curve()).add(record.step, loss)
        self._recent.append(loss)
        return loss

    def state_changed(self, record: StateChanged) -> None:
        """Enters the state; if a clock was set back, from the time of the learner's last change."""
        time = max(record.time, self._last_change.get(record.learner, -math.inf))
        self._last_change[record.learner] = time
        self.timelines.enter(record.learner, record.state, time, record.chips)
        if record.state is State.FINISHED:
            self.finished.add(record.learner)
        else:
            self.finished.discard(record.learner)
        if record.state is State.FAILED:
            self._mark(record.learner, record.time, rejoined=False)

    def noted(self, record: Noted) -> None:
        """Counts a record of the protocol; one of an unknown name changes nothing."""
        match record.name:
            case "round":
                self.rounds.add(record)
            case "round_refused":
                self.rounds.left_out.update(record.values["left_out"])
            case "drop":
                _count(self.drops, record.values.get("reason", "unknown"))
            case "recovered":
                _count(self.inner_states, record.values.get("inner_state", "unknown"))
            case name if name in LOST + READY:
                self._mark(record.values["learner"], record.time, rejoined=name in READY)
            case "guard_quarantined":
                self.quarantined.add(record.values["learner"])
            case "guard_released":
                self.quarantined.discard(record.values["learner"])
            case "records_lost":
                self.counts[RECORDS_LOST] += int(record.values["count"])
            case name if name in _COUNTED:
                self.counts[_COUNTED[name]] += 1

    def transferred(self, record: Transferred) -> None:
        """Counts bytes."""
        self.counts.update(bytes_sent=record.sent, bytes_received=record.received)
        self.sent_by_learner[record.learner] += record.sent
        self.received_by_learner[record.learner] += record.received

    def died(self, record: LearnerDied) -> None:
        """Keeps the failure; of very many the newest."""
        self.failures.append(record)
        del self.failures[:-MOST_FAILURES]
        self._mark(record.learner, record.time, rejoined=False)

    def unfinished(self) -> list[int]:
        """Learners that take part and have not ended."""
        return sorted(self.steps_by_learner.keys() - self.finished - self.away)

    def train_loss(self) -> float | None:
        """The mean over learners of the mean loss of the last 5% of their steps; None if there is none.

        Without those that are gone and had not come to the last 5% of the run's: they saw an early model.
        """
        gone = self.away | self.finished | (self.loss_curves.keys() - self.info.chips_by_learner.keys())
        curves = self.loss_curves.items()
        here = [curve for m, curve in curves if m not in gone or self._clocks[m] >= 0.95 * self.step]
        return statistics.fmean(curve.tail_mean(0.05) for curve in here) if here else None

    def _step_ended(self, record: StepDone) -> None:
        """The time of a skipped step is lost; a baseline is one job, of which learner 0 tells."""
        time = max(record.time, self._last_change.get(record.learner, -math.inf))
        if self.info.num_fragments:
            self.timelines.step_ended(record.learner, time, record.skipped)
        else:
            self.timelines.job_step_ended(time, record.skipped)
        recent = self._skips.setdefault(record.learner, collections.deque(maxlen=RECENT_STEPS))
        recent.append(record.skipped)

    @property
    def skipped_share(self) -> float:
        """What the learners that are there have skipped of their last steps."""
        there = [recent for m, recent in self._skips.items() if m not in self.away]
        return sum(map(sum, there)) / max(1, sum(map(len, there)))

    def _mark(self, learner: int, time: float, rejoined: bool) -> None:
        """Keeps each departure and each rejoining once, though several records may report it."""
        if rejoined is not (learner in self.away) or learner in self.finished:
            return
        (self.away.discard if rejoined else self.away.add)(learner)
        self.timelines.away(learner, math.inf if rejoined else time)
        step = max(self._clocks.get(learner, 0), self.step if rejoined else 0)
        self.marks.append((step, learner, rejoined))


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
    counts[text if text in counts or len(counts) < MOST_REASONS else OTHERS] += 1


def summarize(tally: Tally, now: float, alarms: list[str]) -> dict[str, Any]:
    """What `summary.json` has as of `now` (the records' clock), ready for JSON: None is NaN, or not known.

    Seconds count from the start of the run; tokens a second are taken over the window of
    `ddiloco.goodput.accounting`, so that compilation before the first step does not dilute them.
    Bytes are from the learners' point of view. Losses are nats per token.
    """
    lines, rounds, info = tally.timelines, tally.rounds, tally.info
    started = now if tally.started is None else tally.started
    window = lines.window(now)
    begun, ended = window or (started, now)
    seconds = ended - begun
    last = tally.evaluations[-1] if tally.evaluations else None
    values = {
        "algorithm": info.algorithm,
        "seed": info.seed,
        "num_learners": info.num_learners,
        "num_params": info.num_params,
        "num_fragments": info.num_fragments,
        "total_steps": info.total_steps,
        "step": tally.step,
        "inner_steps": tally.steps_by_learner,
        "tokens": tally.tokens_by_learner,
        "tokens_per_second": tally.tokens / seconds if seconds > 0 else None,
        "started": started,
        "wall_seconds": now - started,
        **performance.summary(tally.performance),
        "train_loss": tally.train_loss(),
        "eval_loss": last.loss if last else None,
        **({f"eval_{name}": value for name, value in last.statistics.items()} if last else {}),
        "eval_history": [_evaluation(record, started) for record in tally.evaluations],
        "rounds": rounds.count,
        "outer_steps": {f: rounds.by_fragment[f] for f in {*range(info.num_fragments), *rounds.by_fragment}},
        "mean_quorum": rounds.mean_quorum(),
        "min_quorum": min(rounds.quorums, default=None),
        "max_quorum": max(rounds.quorums, default=None),
        "merged_share": tally.merged_share(),
        "merged_shares": tally.merged_shares(),
        "mean_grace_seconds": rounds.mean_grace_seconds(),
        "goodput": lines.goodput(now) if window else None,
        "uptime": lines.uptime(now) if window else None,
        "lost": lines.lost(now) if window else {},
        "learner_blocked_seconds": lines.blocked_seconds(now),
        **tally.counts,
        "bytes_sent_by_learner": dict(sorted(tally.sent_by_learner.items())),
        "bytes_received_by_learner": dict(sorted(tally.received_by_learner.items())),
        "inner_states": dict(sorted(tally.inner_states.items())),
        "drops": dict(sorted(tally.drops.items())),
        "offers_left_out": dict(sorted(rounds.left_out.items())),
        "quarantined": sorted(tally.quarantined),
        "failures": [dataclasses.asdict(death) for death in tally.failures],
        "alarms": alarms,
        "params_sha256": None,
        "finished": False,  # until the run says so, with everything saved
        "interrupted": False,
    }
    return as_json(values)


def _evaluation(record: Evaluated, started: float) -> dict[str, Any]:
    return {
        "step": record.step,
        "tokens": record.tokens,
        "seconds": record.time - started,
        "loss": record.loss,
        **record.statistics,
    }
