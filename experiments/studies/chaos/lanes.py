"""What each process of a run did over time, and how the others fared while one was down."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.telemetry.series import StateSpan
from experiments.studies.chaos.processes import SYNCER, learner_name
from experiments.studies.chaos.run_files import Blow, Life, Mark, Trace

STALL = 5.0  # median steps; a longer pause is a stall
SETTLING = 2.0  # seconds after a fault is over that may still be due to it

DOWN = ("dead", "recovering", "hung")
_GOODPUT_STATES = {
    "recovering": State.STARTING,  # counts as reconfiguring after the first time
    "stepping": State.STEPPING,
    "stalled": State.DETECTING,
    "hung": State.DETECTING,
    "dead": State.FAILED,
}


class Gap(NamedTuple):
    """The time between two steps of one process."""

    start: float
    end: float
    seconds: float  # less its own hang


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A process that was started again, in seconds from its start; None: that did not come."""

    target: str
    started: float
    first_step: float | None  # of the syncer: the first round
    first_contribution: float | None  # merged; None of the syncer
    lived: float | None = None  # None: to the end of the record


@dataclasses.dataclass(frozen=True)
class SurvivorGap:
    """How a learner stepped on while another process was down."""

    blow: Blow
    learner: str
    gap_seconds: float
    gap_steps: float  # in the learner's median steps


def median_step(trace: Trace, learner: str) -> float:
    """Seconds between two steps of the learner in the middle of all; 0 with less than two."""
    gaps = [b.time - a.time for a, b in _successive(trace, learner)]
    return statistics.median(gaps) if gaps else 0.0


def gaps_of(trace: Trace, learner: str) -> list[Gap]:
    """Between any two steps of one process of the learner."""
    hangs, found = _hangs(trace, learner), []
    for a, b in _successive(trace, learner):
        hung = sum(max(0.0, min(b.time, end) - max(a.time, start)) for start, end in hangs)
        found.append(Gap(a.time, b.time, b.time - a.time - hung))
    return found


def clock_rate(trace: Trace) -> float:
    """By how much a learner's clock rises in a step while none is down: more than 1, since others set it.

    Counted are steps whose predecessor is surely on record, which move the clock by 1 or 2; 1 if none is.
    """
    down = [span for target in trace.marks for span in lane(trace, target) if span.state in DOWN]
    moves = [
        b.clock - a.clock
        for learner in trace.learners
        for a, b in _successive(trace, learner)
        if b.clock - a.clock in (1, 2) and not any(span.start < b.time and span.end > a.time for span in down)
    ]
    return statistics.mean(moves) if moves else 1.0


def lane(trace: Trace, target: str) -> list[StateSpan]:
    """The target from the start of its first process to its last step or round, in the order of time.

    States are "stepping" (of the syncer "merging"), "stalled", "dead", "recovering" and "hung".
    """
    busy = "merging" if target == SYNCER else "stepping"
    lives = trace.of(target)
    spans: list[StateSpan] = []
    for life, following in itertools.zip_longest(lives, lives[1:]):
        times = [mark.time for mark in trace.marks_in(life)]
        end = life.ended if life.ended is not None and following is not None else max(times, default=None)
        if end is None:
            continue
        begun = min(times, default=end)
        spans += [StateSpan("recovering", life.started, begun), StateSpan(busy, begun, end)]
        if following is not None:
            spans.append(StateSpan("dead", end, following.started))
    if target != SYNCER:
        usual = median_step(trace, target)
        long = [gap for gap in gaps_of(trace, target) if gap.seconds > STALL * usual]
        spans = _cut(spans, "stalled", [(min(gap.end, gap.start + usual), gap.end) for gap in long])
    return _joined(_cut(spans, "hung", _hangs(trace, target)))


def recoveries(trace: Trace) -> list[Recovery]:
    """Of every process that was started in the place of one that had died."""
    found = []
    for life in (life for target in trace.marks for life in trace.of(target)[1:]):
        times = [mark.time for mark in trace.marks_in(life)]
        merged = [r["time"] for r in trace.rounds if _is_in(r["contributions"], life)]
        first, contribution, lived = (
            None if time is None else time - life.started
            for time in (min(times, default=None), min(merged, default=None), life.ended)
        )
        found.append(Recovery(life.target, life.started, first, contribution, lived))
    return sorted(found, key=lambda r: r.started)


def survivor_gaps(trace: Trace) -> list[SurvivorGap]:
    """For each fault, the longest gap of each learner that stood while the fault's target was down.

    Looked at is the time from the fault until the target steps (the syncer: merges) again, and `SETTLING`
    more, but only until the learner itself is down; one that was down already is left out.
    """
    lanes = {learner: lane(trace, learner) for learner in trace.learners}
    gaps = {learner: gaps_of(trace, learner) for learner in trace.learners}
    usual = {learner: median_step(trace, learner) for learner in trace.learners}
    recovered = [(r, r.started + r.first_step) for r in recoveries(trace) if r.first_step is not None]
    found = []
    for blow in trace.blows:
        over = blow.until
        if over is None:
            returns = [t for r, t in recovered if r.target == blow.target and r.started >= blow.time]
            over = min(returns, default=blow.time)
        for learner in trace.learners:
            if learner == blow.target:
                continue
            down = [span for span in lanes[learner] if span.state in DOWN and span.end > blow.time]
            end = min([over + SETTLING, *(span.start for span in down)])
            longest = max(
                (g.seconds for g in gaps[learner] if g.start < end and g.end > blow.time), default=None
            )
            if end > blow.time and longest is not None and usual[learner]:
                found.append(SurvivorGap(blow, learner, longest, longest / usual[learner]))
    return found


def timelines(trace: Trace) -> Timelines:
    """The learners' lanes as ddiloco/goodput counts time; one that hangs or stalls counts as detecting."""
    lines = Timelines(dict.fromkeys(range(len(trace.learners)), 1))
    for number, learner in enumerate(trace.learners):
        spans = lane(trace, learner)
        for span in spans:
            lines.enter(number, _GOODPUT_STATES[span.state], span.start)
        if spans:
            lines.enter(number, State.FINISHED, spans[-1].end)
    return lines


def _successive(trace: Trace, learner: str) -> Iterator[tuple[Mark, Mark]]:
    """Any two steps of one process between which there is no other."""
    for life in trace.of(learner):
        yield from itertools.pairwise(trace.marks_in(life))


def _is_in(contributions: Iterable[Sequence[int]], life: Life) -> bool:
    """Whether the process gave something; its incarnation is its start in microseconds."""
    return any(learner_name(c[0]) == life.target and life.holds(c[1] / 1e6) for c in contributions)


def _hangs(trace: Trace, target: str) -> list[tuple[float, float]]:
    """When the target stood still; a hung process that is killed hangs no more."""
    found = []
    for blow in trace.blows:
        if (blow.target, blow.kind) == (target, "hang"):
            life = next((life for life in trace.of(target) if life.holds(blow.time)), None)
            ends = [t for t in (blow.until, life.ended if life else None) if t is not None]
            if ends:
                found.append((blow.time, min(ends)))
    return found


def _cut(spans: Sequence[StateSpan], state: str, stretches: Iterable[tuple[float, float]]) -> list[StateSpan]:
    """The spans, but in this state during the stretches; who is dead stays dead."""
    out = list(spans)
    for start, end in stretches:
        before, out = out, []
        for span in before:
            a, b = max(span.start, start), min(span.end, end)
            if span.state == "dead" or a >= b:
                out.append(span)
            else:
                out += [span._replace(end=a), StateSpan(state, a, b), span._replace(start=b)]
    return out


def _joined(spans: Iterable[StateSpan]) -> list[StateSpan]:
    """Neighbours of one state as one span; empty ones are left out."""
    out: list[StateSpan] = []
    for span in spans:
        if span.end <= span.start:
            continue
        if out and (out[-1].state, out[-1].end) == (span.state, span.start):
            out[-1] = out[-1]._replace(end=span.end)
        else:
            out.append(span)
    return out
