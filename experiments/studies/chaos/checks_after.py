"""The report of a run under faults: what was lost, who stalled, how long it took to come back."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddiloco.telemetry.formatting import number
from experiments.cli.tables import markdown
from experiments.studies.chaos import lanes
from experiments.studies.chaos.committed import check_outer_steps, check_work
from experiments.studies.chaos.lanes import Recovery, SurvivorGap
from experiments.studies.chaos.processes import SYNCER
from experiments.studies.chaos.run_files import Trace

_STATES = ("stalled", "dead", "recovering", "hung")


def report(trace: Trace, loss: float | None, num_fragments: int) -> dict[str, Any]:
    """Everything that chaos.json says of one run, ready for JSON; `loss`: held-out, at the end (nats)."""
    outer, work = check_outer_steps(trace.rounds, trace.durable), check_work(trace.rounds)
    outer.problems.extend(trace.damage)
    lines = lanes.timelines(trace)
    steps = [step for learner in trace.learners for step in trace.marks[learner]]
    end = max((step.time for step in steps), default=0.0)
    window = lines.window(end)
    crashed = [life for life in trace.lives if life.code and not life.killed]
    return {
        "seconds": window[1] - window[0] if window else 0.0,
        "faults": _faults(trace),
        "missed": trace.missed,
        "crashes": [f"{life.target} ended with exit code {life.code}" for life in crashed],
        "goodput": lines.goodput(end),
        "uptime": lines.uptime(end),
        "lost": lines.lost(end),
        "outer_steps": dataclasses.asdict(outer),
        "work": dataclasses.asdict(work),
        "tokens": sum(step.tokens for step in steps),
        "clock_rate": lanes.clock_rate(trace),
        "merged_tokens": work.merged_tokens / num_fragments,
        "loss": loss,
        "lanes": [_lane(trace, target) for target in trace.marks],
        "gaps": _gaps(lanes.survivor_gaps(trace)),
        "recovery": _recovery(lanes.recoveries(trace)),
    }


def compared(chaos: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> dict[str, Any]:
    """The report with that of an undisturbed run beside it."""
    both = (chaos["loss"], undisturbed["loss"])
    ratio = both[0] / both[1] if None not in both and both[1] else None
    return {**chaos, "undisturbed": undisturbed, "loss_ratio": ratio}


def hostility(
    summary: Mapping[str, Any], deeds: Mapping[str, int], learners: Collection[int]
) -> dict[str, Any]:
    """What hostile peers with these learners' credentials did, and what the run's summary says of it."""
    left_out = {int(m): count for m, count in summary.get("offers_left_out", {}).items()}
    return {
        "learners": sorted(learners),
        "deeds": dict(deeds),
        "left_out": sum(left_out.get(m, 0) for m in learners),
        "honest_left_out": sum(count for m, count in left_out.items() if m not in learners),
        "quarantined": summary.get("quarantined", []),
        "drops": summary.get("drops", {}),
        "alarms": list(summary.get("alarms", ())),
        "failures": [f for f in summary.get("failures", []) if f["learner"] not in learners],
    }


def problems(figures: Mapping[str, Any]) -> list[str]:
    """What must not have happened, in lines; none where all was well."""
    outer, work = figures["outer_steps"], figures["work"]
    found = [*outer["problems"], *work["problems"], *(f"{crash} by itself" for crash in figures["crashes"])]
    attacked = figures.get("hostile", {"failures": []})
    found += [f"learner {failure['learner']} raised an exception" for failure in attacked["failures"]]
    if figures["uptime"] < 1:
        found.append(f"uptime is {figures['uptime']:.2%}: at times no learner stepped")
    return found


def table(figures: Mapping[str, Any]) -> str:
    """The report in words and Markdown tables."""
    head = ("", "starts", "steps", "median step, ms", "at work", *_STATES)
    gaps = [
        (
            name,
            gap["count"],
            f"{1e3 * gap['median_seconds']:.0f}",
            f"{1e3 * gap['longest_seconds']:.0f}",
            f"{gap['longest_steps']:.1f}",
            gap["stalls"],
        )
        for name, gap in figures["gaps"].items()
    ]
    gaps_head = ["another process's fault", "survivors looked at", "median of longest gaps, ms"]
    gaps_head += ["longest, ms", "in median steps", "above 5 steps"]
    recovery = [
        (
            name,
            times["count"],
            *(number(times[figure], ".2f") for figure in ("median", "p90", "longest")),
            times["died_before"],
            number(times["longest_without"], ".2f"),
        )
        for name, times in figures["recovery"].items()
    ]
    recovery_head = ["seconds from a restart to", "restarts", "median", "p90", "longest"]
    recovery_head += ["died before", "after at most"]
    return "\n\n".join(
        [
            markdown(("", ""), _summary(figures)),
            markdown(head, map(_lane_cells, figures["lanes"])),
            markdown(gaps_head, gaps),
            markdown(recovery_head, recovery),
            *_hostile_tables(figures),
        ]
    )


def _hostile_tables(figures: Mapping[str, Any]) -> list[str]:
    if "hostile" not in figures:
        return []
    attacked = figures["hostile"]
    drops = sorted(attacked["drops"].items(), key=lambda drop: -drop[1])
    rows = [
        ("deeds of the hostile", sum(attacked["deeds"].values())),
        ("their offers left out", attacked["left_out"]),
        ("honest offers left out", attacked["honest_left_out"]),
        ("in quarantine at the end", attacked["quarantined"]),
        ("alarms", len(attacked["alarms"])),
        ("exceptions of honest learners", len(attacked["failures"])),
    ]
    return [markdown(("", ""), rows), markdown(("dropped", "times"), drops)]


def _summary(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    outer, work, undisturbed = figures["outer_steps"], figures["work"], figures.get("undisturbed")
    faults = ", ".join(f"{count} {name}" for name, count in figures["faults"].items()) or "none"
    steps = f"{outer['committed']} committed, {outer['lost']} lost, {outer['twice']} made twice"
    tokens = f"{figures['tokens']} trained on, {figures['merged_tokens']:.0f} merged, {work['twice_tokens']}"
    rows = [
        ("faults", f"{faults}; {figures['missed']} found nobody"),
        ("seconds", f"{figures['seconds']:.1f}"),
        ("goodput, uptime", f"{figures['goodput']:.1%}, {figures['uptime']:.2%}"),
        ("outer steps", f"{steps}, {outer['unrecorded']} durable without a record"),
        ("tokens", f"{tokens} counted twice in {work['contributions']} contributions"),
        ("held-out loss", number(figures["loss"], ".4f")),
    ]
    if undisturbed is not None:
        alone = f"{number(undisturbed['loss'], '.4f')}, {undisturbed['tokens']} tokens"
        more = None if figures["loss_ratio"] is None else figures["loss_ratio"] - 1
        rows += [("the same undisturbed", alone), ("loss against undisturbed", number(more, "+.2%"))]
    return rows


def _faults(trace: Trace) -> dict[str, int]:
    kinds = collections.Counter(
        f"{b.kind}s of {'the syncer' if b.target == SYNCER else 'learners'}" for b in trace.blows
    )
    return dict(sorted(kinds.items()))


def _lane(trace: Trace, target: str) -> dict[str, Any]:
    """One process of chaos.json, all of its lives together."""
    seconds: collections.Counter[str] = collections.Counter()
    for span in lanes.lane(trace, target):
        seconds[span.state] += span.end - span.start
    common = {"target": target, "starts": len(trace.of(target))}
    if target == SYNCER:
        return {**common, "rounds": len(trace.rounds), "seconds": dict(seconds)}
    return {
        **common,
        "steps": len(trace.marks[target]),
        "median_step_seconds": lanes.median_step(trace, target),
        "seconds": dict(seconds),
    }


def _lane_cells(lane: Mapping[str, Any]) -> tuple[Any, ...]:
    seconds, total = lane["seconds"], sum(lane["seconds"].values()) or 1.0
    at_work = seconds.get("stepping", 0.0) + seconds.get("merging", 0.0)
    step = lane.get("median_step_seconds")
    return (
        lane["target"],
        lane["starts"],
        lane.get("steps", f"{lane.get('rounds')} rounds"),
        "" if step is None else f"{1e3 * step:.0f}",
        *(f"{share / total:.1%}" for share in (at_work, *(seconds.get(state, 0.0) for state in _STATES))),
    )


def _gaps(found: Sequence[SurvivorGap]) -> dict[str, dict[str, Any]]:
    """By kind of fault, over all faults and survivors."""

    def kind(a: SurvivorGap) -> str:
        return f"{a.blow.kind} of a {'syncer' if a.blow.target == SYNCER else 'learner'}"

    by_kind = {}
    for name, members in itertools.groupby(sorted(found, key=kind), kind):
        group = list(members)
        by_kind[name] = {
            "count": len(group),
            "median_seconds": statistics.median(a.gap_seconds for a in group),
            "longest_seconds": max(a.gap_seconds for a in group),
            "longest_steps": max(a.gap_steps for a in group),
            "stalls": sum(a.gap_steps > lanes.STALL for a in group),
        }
    return by_kind


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
