"""Published traces of failures and spot capacity, and what four systems make of them.

Three formats are distinguished by their contents; nothing of them is shipped here:

  InfiniteHBD-Trace (stepfun-ai, Apache-2.0)  JSON list of {node_id, event_time in days, event_type}
  spot-traces (skypilot-org)                  JSON {metadata: {gap_seconds}, data: [instances at each tick]}
  bamboo (uclasystem, MIT)                    CSV without a header: milliseconds, add or remove, node
"""

from __future__ import annotations

import csv
import dataclasses
import heapq
import json
import math
import pathlib
from collections.abc import Iterable, Sequence

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.jobs import Interruption, JobChange, job_changes, job_chips
from experiments.studies.goodput.systems import System

DAY = 24 * 3600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Outages:
    """When servers of a fleet are away, each from `time` until `back_at`; sorted by time."""

    servers: int
    seconds: float  # that the trace lasts
    outages: tuple[Interruption, ...]

    @property
    def available(self) -> float:
        """The share of the servers' time in which they are there."""
        away = sum(min(one.returns_at, self.seconds) - one.time for one in self.outages)
        return 1.0 - away / (self.servers * self.seconds)


def read_outages(path: pathlib.Path, servers: int | None = None) -> Outages:
    """A published trace; `servers` where more were watched than it names.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has none of the formats, lacks something, or names more servers; the message names it.
    """
    try:
        trace = _read(path.suffix, path.read_text())
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        problem = error if isinstance(error, ValueError) else repr(error)  # of others the kind says something
        raise ValueError(f"{path}: cannot be used: {problem}") from None
    if servers is None:
        return trace
    if servers < trace.servers:
        raise ValueError(f"{path}: names {trace.servers} servers, more than {servers}")
    return dataclasses.replace(trace, servers=servers)


def replaced(trace: Outages, spares: int, seconds: float) -> Outages:
    """The same fleet with its last servers as spares: the slots that are left, and when each is empty.

    A server that fails is replaced `seconds` later by a spare, if one is there, else by the next server that
    is repaired; who is repaired and not needed is a spare.
    """
    slots = trace.servers - spares
    slot_of = {server: server for server in range(slots)}
    idle, empty = list(range(slots, trace.servers)), list[tuple[float, int]]()
    found: list[Interruption] = []
    events = [(one.time, 1, one.slice) for one in trace.outages]
    events += [(one.returns_at, 0, one.slice) for one in trace.outages]
    for time, fails, server in sorted(events):
        if not fails:
            idle.append(server)
        elif server in idle:
            idle.remove(server)
        else:
            empty.append((time, slot_of.pop(server)))
        while idle and empty:
            since, slot = empty.pop(0)
            slot_of[idle[0]] = slot
            idle.pop(0)
            found.append(Interruption(since, slot, time + seconds))
    found += [Interruption(since, slot, trace.seconds + 1.0) for since, slot in empty]
    return Outages(slots, trace.seconds, tuple(sorted(found, key=lambda one: (one.time, one.slice))))


def goodput(
    system: System, model: FailureModel, trace: Outages, spares: int, seconds: float
) -> tuple[float, float]:
    """Goodput and uptime of the system on the fleet of the trace, of which so many servers are spares."""
    slots = replaced(trace, spares, seconds)
    chips, each = slots.servers * model.chips_per_slice, model.chips_per_slice
    if system.elastic:
        jobs = system.num_learners
        of_jobs = job_chips(model, chips, jobs, elastic=True)
        changes = job_changes(model, slots.outages, chips, jobs, 0, trace.seconds, elastic=True)
    else:
        jobs, of_jobs, changes = 1, {0: chips}, list(_rigid(model, slots))
    lines = Timelines({**of_jobs, **({jobs: spares * each} if spares else {})})
    if spares:
        lines.enter(jobs, State.STANDBY, 0.0, spares * each)
    for change in changes:
        lines.enter(change.job, change.state, change.time, change.chips)
    return lines.goodput(trace.seconds), lines.uptime(trace.seconds)


def _rigid(model: FailureModel, slots: Outages) -> Iterable[JobChange]:
    """A job without elasticity waits for every slot to be filled, starts again, and repeats half a step."""
    chips = slots.servers * model.chips_per_slice
    yield JobChange(0.0, 0, State.STEPPING, chips)
    at, outages = 0, slots.outages
    while at < len(outages):
        begun = outages[at].time
        whole = begun + model.detection_seconds
        running = whole + model.restart_seconds
        while at < len(outages) and outages[at].time < running:
            whole = max(whole, outages[at].returns_at)
            running = max(whole, outages[at].time + model.detection_seconds) + model.restart_seconds
            at += 1
        yield JobChange(begun, 0, State.DETECTING, chips)
        yield JobChange(begun + model.detection_seconds, 0, State.FAILED, chips)
        yield JobChange(max(whole, running - model.restart_seconds), 0, State.RECONFIGURING, chips)
        yield JobChange(running, 0, State.REPLAYING, chips)
        redone = running + model.step_seconds / 2.0
        if at == len(outages) or redone < outages[at].time:
            yield JobChange(redone, 0, State.STEPPING, chips)


def _read(suffix: str, text: str) -> Outages:
    if suffix == ".csv":
        return _added_and_removed(csv.reader(text.splitlines()))
    values = json.loads(text)
    if isinstance(values, dict) and "data" in values:
        return _counted(values["data"], values["metadata"]["gap_seconds"])
    if isinstance(values, list) and values and "node_id" in values[0]:
        return _faults(values)
    raise ValueError("it has none of the formats of traces")


def _faults(events: Sequence[dict]) -> Outages:
    """Of several faults of a node at a time, the node is away until the last has ended."""
    names = {name: i for i, name in enumerate(dict.fromkeys(event["node_id"] for event in events))}
    seconds = max(event["event_time"] for event in events) * DAY
    open_faults, since = dict.fromkeys(names, 0), dict[str, float]()
    found = []
    for event in sorted(events, key=lambda event: event["event_time"]):
        node, time = event["node_id"], event["event_time"] * DAY
        if event["event_type"] == "fault_start":
            since.setdefault(node, time)
            open_faults[node] += 1
        elif open_faults[node]:
            open_faults[node] -= 1
            if not open_faults[node]:
                found.append(Interruption(since.pop(node), names[node], time))
    found += [Interruption(time, names[node], seconds + 1.0) for node, time in since.items()]
    return _outages(len(names), seconds, found)


def _counted(counts: Sequence[int], gap: float) -> Outages:
    """The highest count is the fleet; who came last goes first."""
    found, since = [], dict[int, float]()
    for tick, count in enumerate(counts):
        for slot in range(max(counts)):
            if slot >= count:
                since.setdefault(slot, tick * gap)
            elif slot in since:
                found.append(Interruption(since.pop(slot), slot, tick * gap))
    seconds = len(counts) * gap
    found += [Interruption(time, slot, seconds + 1.0) for slot, time in since.items()]
    return _outages(max(counts), seconds, found)


def _added_and_removed(rows: Iterable[Sequence[str]]) -> Outages:
    """The most nodes at one time are the fleet; a new node takes the first free place."""
    changes = [(float(time) / 1e3, event, node) for time, event, node in rows]
    free, most = list[int](), 0
    place, since, found = dict[str, int](), dict[int, float](), []
    for time, event, node in changes:
        if event == "remove":
            since[place[node]] = time
            heapq.heappush(free, place.pop(node))
            continue
        if free:
            slot = heapq.heappop(free)
        else:
            slot, most = most, most + 1
            since[slot] = 0.0
        place[node] = slot
        found.append(Interruption(since.pop(slot), slot, time))
    seconds = changes[-1][0]
    found += [Interruption(time, slot, seconds + 1.0) for slot, time in since.items()]
    return _outages(most, seconds, found)


def _outages(servers: int, seconds: float, found: Iterable[Interruption]) -> Outages:
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"it lasts {seconds} seconds")
    lasting = [one for one in found if one.returns_at > one.time and one.time < seconds]
    return Outages(servers, seconds, tuple(sorted(lasting, key=lambda one: (one.time, one.slice))))
