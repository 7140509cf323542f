"""What each process of a run did over time, and how the others fared while one was down."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddiloco.goodput.accounting import State, Timelines
from experiments.studies.chaos.processes import SYNCER, learner_name
from experiments.studies.chaos.traces import Blow, Life, Step, Trace, syncer_deaths

STALL = 5.0  # median steps; a longer pause is a stall
SETTLING = 2.0  # seconds after a fault is over that may still be due to it
_UNWRITTEN = 1.0  # seconds before its death of which a syncer may not have written what it was told

DOWN = ("dead", "recovering", "hung")
_GOODPUT_STATES = {
    "recovering": State.STARTING,  # counts as reconfiguring after the first time
    "stepping": State.STEPPING,
    "stalled": State.DETECTING,
    "hung": State.DETECTING,
    "dead": State.FAILED,
}


class Span(NamedTuple):
    """A stretch of a lane, in unix seconds."""

    state: str  # "stepping", "stalled", "dead", "recovering" or "hung"; of the syncer "merging" too
    start: float
    end: float


class Gap(NamedTuple):
    """The time between two steps of one process."""

    start: float
    end: float
    seconds: float  # less what steps took whose records are gone, and less its own hang


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A process that was started again, in seconds from its start; None: that did not come."""

    target: str
    started: float
    first_step: float | None  # of the syncer: the first round
    first_contribution: float | None  # merged; None of the syncer
    lived: float | None = None  # None: to the end of the record


@dataclasses.dataclass(frozen=True)
class Aftermath:
    """How a learner stepped on while another process was down."""

    blow: Blow
    learner: int
    gap_seconds: float
    gap_steps: float  # in the learner's median steps


def median_step(trace: Trace, learner: int) -> float:
    """Seconds between two steps of the learner in the middle of all; 0 with less than two."""
    gaps = [g for life in _learner_lives(trace, learner) for g in _raw_gaps(_steps_of(trace, learner, life))]
    return statistics.median(gaps) if gaps else 0.0


def gaps_of(trace: Trace, learner: int) -> list[Gap]:
    """Between any two steps of one process of the learner.

    A syncer that is killed takes along up to a second of what learners have told it. Where a gap lies there
    and the learner's clock went on by more than one, steps that are not on record count as median ones.
    """
    usual, deaths = median_step(trace, learner), syncer_deaths(trace)
    hangs = _hangs(trace, learner_name(learner))
    found = []
    for life in _learner_lives(trace, learner):
        for a, b in itertools.pairwise(_steps_of(trace, learner, life)):
            hung = sum(max(0.0, min(b.time, end) - max(a.time, start)) for start, end in hangs)
            seconds = b.time - a.time - hung
            if any(a.time <= death and b.time >= death - _UNWRITTEN for death in deaths):
                unrecorded = max(0, b.clock - a.clock - 1)
                seconds = max(seconds - unrecorded * usual, seconds / (unrecorded + 1))
            found.append(Gap(a.time, b.time, seconds))
    return found


def clock_rate(trace: Trace) -> float:
    """By how much a learner's clock goes on in a step while none is down: more than 1, since others set it.

    Counted are steps whose predecessor is surely on record, which move the clock by 1 or 2; 1 if none is.
    """
    down = [span for m in trace.steps for span in learner_lane(trace, m) if span.state in DOWN]
    down += [span for span in syncer_lane(trace) if span.state in DOWN]
    moves = [
        b.clock - a.clock
        for learner in trace.steps
        for life in _learner_lives(trace, learner)
        for a, b in itertools.pairwise(_steps_of(trace, learner, life))
        if b.clock - a.clock in (1, 2) and not any(span.start < b.time and span.end > a.time for span in down)
    ]
    return statistics.mean(moves) if moves else 1.0


def learner_lane(trace: Trace, learner: int) -> list[Span]:
    """The learner from the start of its first process to its last step, in the order of time."""
    usual = median_step(trace, learner)
    stalls = {(g.start, g.end): g for g in gaps_of(trace, learner) if g.seconds > STALL * usual}
    lives = _learner_lives(trace, learner)
    spans: list[Span] = []
    for life, following in itertools.zip_longest(lives, lives[1:]):
        steps = _steps_of(trace, learner, life)
        end = life.ended if life.ended is not None and following is not None else None
        if not steps:
            if end is not None:
                spans.append(Span("recovering", life.started, end))
        else:
            spans.append(Span("recovering", life.started, steps[0].time))
            for a, b in itertools.pairwise(steps):
                if (a.time, b.time) in stalls:
                    spans.append(Span("stepping", a.time, min(b.time, a.time + usual)))
                    spans.append(Span("stalled", min(b.time, a.time + usual), b.time))
                else:
                    spans.append(Span("stepping", a.time, b.time))
            if end is not None:
                spans.append(Span("stepping", steps[-1].time, max(end, steps[-1].time)))
        if following is not None and end is not None:
            spans.append(Span("dead", end, following.started))
    return _merged(_with_hangs(spans, _hangs(trace, learner_name(learner))))


def syncer_lane(trace: Trace) -> list[Span]:
    """The syncer from its first start to its last round."""
    lives = trace.of(SYNCER)
    spans: list[Span] = []
    for life, following in itertools.zip_longest(lives, lives[1:]):
        times = [r["time"] for r in trace.rounds if life.holds(r["time"])]
        end = life.ended if life.ended is not None and following is not None else max(times, default=None)
        begun = min(times, default=end)
        if end is None or begun is None:
            continue
        spans += [Span("recovering", life.started, begun), Span("merging", begun, end)]
        if following is not None:
            spans.append(Span("dead", end, following.started))
    return _merged(_with_hangs(spans, _hangs(trace, SYNCER)))


def recoveries(trace: Trace) -> list[Recovery]:
    """Of every process that was started in the place of one that had died."""
    found = []
    for learner in trace.steps:
        for life in _learner_lives(trace, learner)[1:]:
            steps = _steps_of(trace, learner, life)
            merged = [r["time"] for r in trace.rounds if _is_in(r["contributions"], learner, life)]
            found.append(
                Recovery(
                    life.target,
                    life.started,
                    steps[0].time - life.started if steps else None,
                    min(merged) - life.started if merged else None,
                    life.ended - life.started if life.ended is not None else None,
                )
            )
    for life in trace.of(SYNCER)[1:]:
        times = [r["time"] for r in trace.rounds if life.holds(r["time"])]
        first = min(times) - life.started if times else None
        lived = life.ended - life.started if life.ended is not None else None
        found.append(Recovery(SYNCER, life.started, first, None, lived))
    return sorted(found, key=lambda r: r.started)


def aftermaths(trace: Trace) -> list[Aftermath]:
    """For each fault, the longest gap of each learner that stood while the fault's target was down.

    Looked at is the time from the fault until the target steps (the syncer: merges) again, and `SETTLING`
    more, but only until the learner itself is down; one that was down already is left out.
    """
    lanes = {m: learner_lane(trace, m) for m in trace.steps}
    gaps = {m: gaps_of(trace, m) for m in trace.steps}
    usual = {m: median_step(trace, m) for m in trace.steps}
    back = {r: r.started + r.first_step for r in recoveries(trace) if r.first_step is not None}
    found = []
    for blow in trace.blows:
        over = blow.until
        if over is None:
            returns = [t for r, t in back.items() if r.target == blow.target and r.started >= blow.time]
            over = min(returns, default=blow.time)
        for learner, lane in lanes.items():
            if learner_name(learner) == blow.target:
                continue
            down = [span for span in lane if span.state in DOWN and span.end > blow.time]
            end = min([over + SETTLING, *(span.start for span in down)])
            longest = max(
                (g.seconds for g in gaps[learner] if g.start < end and g.end > blow.time), default=None
            )
            if end > blow.time and longest is not None and usual[learner]:
                found.append(Aftermath(blow, learner, longest, longest / usual[learner]))
    return found


def timelines(trace: Trace) -> Timelines:
    """The learners' lanes as ddiloco/goodput counts time; one that hangs or stalls counts as detecting."""
    lines = Timelines(dict.fromkeys(trace.steps, 1))
    for learner in trace.steps:
        lane = learner_lane(trace, learner)
        for span in lane:
            lines.enter(learner, _GOODPUT_STATES[span.state], span.start)
        if lane:
            lines.enter(learner, State.FINISHED, lane[-1].end)
    return lines


def _learner_lives(trace: Trace, learner: int) -> list[Life]:
    return trace.of(learner_name(learner))


def _steps_of(trace: Trace, learner: int, life: Life) -> list[Step]:
    return [step for step in trace.steps[learner] if life.holds(step.time)]


def _raw_gaps(steps: Sequence[Step]) -> Iterable[float]:
    return (b.time - a.time for a, b in itertools.pairwise(steps))


def _is_in(contributions: Sequence[Sequence[int]], learner: int, life: Life) -> bool:
    """Whether a process of the learner gave something; its incarnation is its start in microseconds."""
    return any(c[0] == learner and life.holds(c[1] / 1e6) for c in contributions)


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


def _with_hangs(spans: Sequence[Span], hangs: Sequence[tuple[float, float]]) -> list[Span]:
    """The spans with each hang cut into those that it lies in, but for those of the dead."""
    out = list(spans)
    for start, end in hangs:
        before, out = out, []
        for span in before:
            a, b = max(span.start, start), min(span.end, end)
            if span.state == "dead" or a >= b:
                out.append(span)
                continue
            out += [span._replace(end=a), Span("hung", a, b), span._replace(start=b)]
    return out


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one state as one span; empty ones are left out."""
    out: list[Span] = []
    for span in spans:
        if span.end <= span.start:
            continue
        if out and (out[-1].state, out[-1].end) == (span.state, span.start):
            out[-1] = out[-1]._replace(end=span.end)
        else:
            out.append(span)
    return out
