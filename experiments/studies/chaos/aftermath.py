"""The report of a run under faults: what was lost, who stalled, how long it took to come back."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.studies.chaos import lanes
from experiments.studies.chaos.committed import check_outer_steps, check_work
from experiments.studies.chaos.lanes import Aftermath, Recovery, Span
from experiments.studies.chaos.processes import SYNCER, learner_name
from experiments.studies.chaos.traces import Trace

_STATES = ("stalled", "dead", "recovering", "hung")


def report(trace: Trace, loss: float | None, interval: int, num_fragments: int) -> dict[str, Any]:
    """Everything that chaos.json says of one run, ready for JSON.

    Args:
      trace: what the run left.
      loss: held-out, at the end, in nats per token.
      interval: H, steps.
      num_fragments: P.
    """
    outer, work = check_outer_steps(trace.rounds, trace.durable), check_work(trace.rounds)
    outer.problems.extend(trace.damage)
    lines = lanes.timelines(trace)
    end = max((steps[-1].time for steps in trace.steps.values() if steps), default=0.0)
    window = lines.window(end)
    trained = sum(step.tokens for steps in trace.steps.values() for step in steps)
    return {
        "seconds": window[1] - window[0] if window else 0.0,
        "faults": _faults(trace),
        "missed": trace.missed,
        "crashes": [
            f"{life.target} ended with exit code {life.code}"
            for life in trace.lives
            if life.code and not life.killed
        ],
        "goodput": lines.goodput(end),
        "uptime": lines.uptime(end),
        "lost": lines.lost(end),
        "outer_steps": dataclasses.asdict(outer),
        "work": dataclasses.asdict(work),
        "tokens": trained,
        "clock_rate": lanes.clock_rate(trace),
        "merged_tokens": work.merged_tokens / num_fragments,
        "loss": loss,
        "lanes": [_learner(trace, m, end) for m in trace.steps] + [_syncer(trace)],
        "gaps": _gaps(lanes.aftermaths(trace)),
        "longest_gaps": [_aftermath(a) for a in _worst(lanes.aftermaths(trace))],
        "recovery": _recovery(lanes.recoveries(trace)),
        "cycle_seconds": interval * statistics.mean(lanes.median_step(trace, m) for m in trace.steps),
    }


def compared(chaos: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """The report with that of an undisturbed run beside it."""
    both = (chaos["loss"], undisturbed["loss"])
    ratio = both[0] / both[1] if None not in both and both[1] else None
    return {**chaos, "undisturbed": undisturbed, "loss_ratio": ratio}


def problems(told: Mapping[str, Any]) -> list[str]:
    """What must not have happened, in lines; none where all was well."""
    outer, work = told["outer_steps"], told["work"]
    found = [*outer["problems"], *work["problems"], *(f"{crash} by itself" for crash in told["crashes"])]
    if told["uptime"] < 1:
        found.append(f"uptime is {told['uptime']:.2%}: at times no learner stepped")
    return found


def table(told: Mapping[str, Any]) -> str:
    """The report in words and Markdown tables."""
    outer, work, undisturbed = told["outer_steps"], told["work"], told.get("undisturbed")
    faults = ", ".join(f"{count} {name}" for name, count in told["faults"].items()) or "none"
    rows = [
        ("faults", f"{faults}; {told['missed']} found nobody"),
        ("seconds", f"{told['seconds']:.1f}"),
        ("goodput, uptime", f"{told['goodput']:.1%}, {told['uptime']:.2%}"),
        (
            "outer steps",
            f"{outer['committed']} committed, {outer['lost']} lost, {outer['twice']} made twice, "
            f"{outer['unrecorded']} durable without a record",
        ),
        (
            "tokens",
            f"{told['tokens']} trained on, {told['merged_tokens']:.0f} merged, {work['twice_tokens']} "
            f"counted twice in {work['contributions']} contributions",
        ),
        ("held-out loss", _number(told["loss"], 4)),
    ]
    if undisturbed is not None:
        ratio = told["loss_ratio"]
        rows += [
            ("the same undisturbed", f"{_number(undisturbed['loss'], 4)}, {undisturbed['tokens']} tokens"),
            ("loss against undisturbed", "-" if ratio is None else f"{ratio - 1:+.2%}"),
        ]
    return "\n\n".join(
        [
            _grid(("", ""), rows),
            _grid(
                ("", "starts", "steps", "median step, ms", "at work", *_STATES),
                [_lane_row(lane) for lane in told["lanes"]],
            ),
            _grid(
                (
                    "another process's fault",
                    "survivors looked at",
                    "median of longest gaps, ms",
                    "longest, ms",
                    "in median steps",
                    "above 5 steps",
                ),
                [
                    (
                        name,
                        g["count"],
                        f"{1e3 * g['median_seconds']:.0f}",
                        f"{1e3 * g['longest_seconds']:.0f}",
                        f"{g['longest_steps']:.1f}",
                        g["stalls"],
                    )
                    for name, g in told["gaps"].items()
                ],
            ),
            _grid(
                (
                    "seconds from a restart to",
                    "restarts",
                    "median",
                    "p90",
                    "longest",
                    "died before",
                    "after at most",
                ),
                [
                    (
                        name,
                        r["count"],
                        *(_number(r[k], 2) for k in ("median", "p90", "longest")),
                        r["died_before"],
                        _number(r["longest_without"], 2),
                    )
                    for name, r in told["recovery"].items()
                ],
            ),
        ]
    )


def _faults(trace: Trace) -> dict[str, int]:
    kinds = collections.Counter(
        f"{b.kind}s of {'the syncer' if b.target == SYNCER else 'learners'}" for b in trace.blows
    )
    return dict(sorted(kinds.items()))


def _learner(trace: Trace, learner: int, end: float) -> dict[str, Any]:
    lane = lanes.learner_lane(trace, learner)
    quiet = [g.seconds for g in lanes.gaps_of(trace, learner) if trace.storm and g.end < trace.storm]
    return {
        "target": learner_name(learner),
        "starts": len(trace.of(learner_name(learner))),
        "steps": len(trace.steps[learner]),
        "median_step_seconds": lanes.median_step(trace, learner),
        "longest_gap_before_the_faults": max(quiet, default=None),
        "seconds": _seconds(lane),
    }


def _syncer(trace: Trace) -> dict[str, Any]:
    return {
        "target": SYNCER,
        "starts": len(trace.of(SYNCER)),
        "rounds": len(trace.rounds),
        "seconds": _seconds(lanes.syncer_lane(trace)),
    }


def _seconds(lane: Iterable[Span]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for span in lane:
        total[span.state] += span.end - span.start
    return dict(total)


def _gaps(found: Sequence[Aftermath]) -> dict[str, dict[str, Any]]:
    """By kind of fault, over all faults and survivors."""
    groups: dict[str, list[Aftermath]] = {}
    for a in found:
        who = "syncer" if a.blow.target == SYNCER else "learner"
        groups.setdefault(f"{a.blow.kind} of a {who}", []).append(a)
    return {
        name: {
            "count": len(group),
            "median_seconds": statistics.median(a.gap_seconds for a in group),
            "longest_seconds": max(a.gap_seconds for a in group),
            "longest_steps": max(a.gap_steps for a in group),
            "stalls": sum(a.gap_steps > lanes.STALL for a in group),
        }
        for name, group in sorted(groups.items())
    }


def _worst(found: Sequence[Aftermath], count: int = 10) -> list[Aftermath]:
    return sorted(found, key=lambda a: -a.gap_steps)[:count]


def _aftermath(a: Aftermath) -> dict[str, Any]:
    return {
        **dataclasses.asdict(a.blow),
        "learner": a.learner,
        "seconds": a.gap_seconds,
        "steps": a.gap_steps,
    }


def _recovery(found: Sequence[Recovery]) -> dict[str, dict[str, Any]]:
    learners = [r for r in found if r.target != SYNCER]
    syncer = [r for r in found if r.target == SYNCER]
    return {
        "a learner's first step": _spread([(r.first_step, r.lived) for r in learners]),
        "a learner's first contribution": _spread([(r.first_contribution, r.lived) for r in learners]),
        "the syncer's first round": _spread([(r.first_step, r.lived) for r in syncer]),
    }


def _spread(values: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Of seconds until something came; where it did not, the process may have died too soon."""
    known = sorted(came for came, _ in values if came is not None)
    without = [lived or 0.0 for came, lived in values if came is None]
    return {
        "count": len(values),
        "median": statistics.median(known) if known else None,
        "p90": known[math.ceil(0.9 * len(known)) - 1] if known else None,
        "longest": known[-1] if known else None,
        "died_before": len(without),
        "longest_without": max(without, default=None),
    }


def _lane_row(lane: Mapping[str, Any]) -> tuple[Any, ...]:
    seconds, total = lane["seconds"], sum(lane["seconds"].values()) or 1.0
    active = seconds.get("stepping", 0.0) + seconds.get("merging", 0.0)
    others = [seconds.get(state, 0.0) for state in _STATES]
    step = lane.get("median_step_seconds")
    return (
        lane["target"],
        lane["starts"],
        lane.get("steps", f"{lane.get('rounds')} rounds"),
        "" if step is None else f"{1e3 * step:.0f}",
        *(f"{share / total:.1%}" for share in (active, *others)),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
