"""Definitions of goodput, uptime and lost time, for real and simulated runs (docs/dashboard.md)."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

_PENDING = 4096  # intervals that a `Cover` keeps before it joins them


def covered(starts: np.ndarray, ends: np.ndarray, depth: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Times covered by at least `depth` intervals: starts and ends of sorted disjoint intervals.

    `starts` and `ends` are float arrays of shape [n]; intervals that abut are one, empty ones are none.
    """
    times = np.concatenate([starts, ends])
    change = np.repeat([1, -1], len(starts))
    order = np.lexsort((-change, times))  # at one time starts come before ends, so that no gap opens there
    inside = np.cumsum(change[order]) >= depth
    edges = np.diff(inside, prepend=False, append=False)
    at = times[order][np.flatnonzero(edges[: len(order)])]
    starts, ends = at[0::2], at[1::2]
    return starts[ends > starts], ends[ends > starts]


class Cover:
    """A union of intervals that grows; it keeps the disjoint intervals of which it consists."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._joined = 0  # intervals in front that are disjoint and sorted

    def add(self, start: float, end: float) -> None:
        """One more interval, `start` <= `end`."""
        self._starts.append(start)
        self._ends.append(end)
        if len(self._starts) > 2 * self._joined + _PENDING:
            self._join()

    def seconds(self, open_ones: Sequence[tuple[float, float]] = ()) -> float:
        """The length of the union with these intervals, which are not kept."""
        self._join()
        intervals = [*zip(self._starts, self._ends, strict=True), *open_ones]
        starts, ends = covered(*np.array(intervals).reshape(-1, 2).T)
        return math.fsum(ends - starts)

    def _join(self) -> None:
        starts, ends = covered(np.array(self._starts), np.array(self._ends))
        self._starts, self._ends = starts.tolist(), ends.tolist()
        self._joined = len(self._starts)


MAX_UNCUT = 10_000  # spans of a learner that may reach out of the window; honest ones have fewer


class State(enum.Enum):
    """State of a learner's chips."""

    STARTING = "starting"  # before the first step: compiles, loads; not allocated yet
    STEPPING = "stepping"  # useful work
    SKIPPING = "skipping"  # steps that change nothing, as loss or gradient is not finite; known at their end
    WAITING_FOR_PEERS = "waiting_for_peers"  # at its run-ahead bound, or for the slowest of its own chips
    WAITING_FOR_NETWORK = "waiting_for_network"  # for a transfer that the next step needs
    DETECTING = "detecting"  # stands still before a failure is detected
    RECONFIGURING = "reconfiguring"  # rejoins, restores, fetches, compiles, adds or removes slices
    REPLAYING = "replaying"  # repeats lost work
    STANDBY = "standby"  # spare chips, kept idle
    FAILED = "failed"  # dead, while others train
    FINISHED = "finished"  # left after its last step; no longer allocated


CAUSES = tuple(s for s in State if s not in (State.STARTING, State.STEPPING, State.FINISHED))
COUNTED = (State.STEPPING, *CAUSES)  # states of allocated chips
WAITING = (State.WAITING_FOR_PEERS, State.WAITING_FOR_NETWORK)
ACTIVE = tuple(s for s in COUNTED if s not in (State.STANDBY, State.FAILED))
_ALLOCATING = (State.STEPPING, State.RECONFIGURING, State.STANDBY)


def shares(chip_seconds: Mapping[State, float]) -> tuple[float, dict[str, float]]:
    """Goodput, and the share lost to each cause, from allocated chip-seconds by state; they add up to 1.

    A missing state counts as 0. Where nothing is allocated, goodput is 1.
    """
    allocated = sum(chip_seconds.values())
    if allocated <= 0:
        return 1.0, dict.fromkeys((cause.value for cause in CAUSES), 0.0)
    lost = {cause.value: chip_seconds.get(cause, 0.0) / allocated for cause in CAUSES}
    return chip_seconds.get(State.STEPPING, 0.0) / allocated, lost


class Timelines:
    """The states of all learners over time, and the shares that follow from them.

    Each learner's changes must come in the order of their times; between learners any order will do
    and gives the same figures. Memory does not grow with the number of changes, except for moments at
    which no learner steps and changes that a learner makes before its first step or while it is not active.
    A `now` before the last change counts as the time of that change.
    """

    def __init__(self, chips_by_learner: Mapping[int, int]) -> None:
        """`chips_by_learner`: of all that may take part; raises ValueError if one has no chip."""
        for learner, chips in chips_by_learner.items():
            if chips <= 0:
                raise ValueError(f"learner {learner}: has {chips} chips, but must have at least 1")
        self._tracks = {learner: _Track(chips, chips) for learner, chips in chips_by_learner.items()}
        self._cover = Cover()
        self._opened: float | None = None
        self._last_active = -float("inf")
        self._last_change = -float("inf")

    def enter(self, learner: int, state: State, now: float, chips: int | None = None) -> None:
        """The learner is in `state`, with `chips` of its chips in the job, from `now` (seconds) on.

        `chips` None stands for all; the rest count as FAILED meanwhile. Entering the present state changes
        nothing.

        Raises:
          ValueError: the learner is unknown, `now` is before its previous change, or it has fewer chips.
        """
        track = self._tracks.get(learner)
        if track is None:
            raise ValueError(f"learner {learner}: is unknown; known are {sorted(self._tracks)}")
        if not now >= track.since:
            raise ValueError(
                f"learner {learner}: enters {state.name} at {now}, before its last change at {track.since}"
            )
        present = track.chips if chips is None else chips
        fewest = 1 if state is State.STEPPING else 0
        if not fewest <= present <= track.chips:
            raise ValueError(
                f"learner {learner}: enters {state.name} with {present} chips, but may with "
                f"{fewest} to {track.chips}"
            )
        self._last_change = max(self._last_change, now)
        if state is State.FAILED:
            now = self.failed_since(learner, now)
        if state is State.STARTING and track.allocated:
            state = State.RECONFIGURING
        if (state, present) == (track.state, track.present):
            return
        if track.state in ACTIVE:
            self._last_active = max(self._last_active, now)
        if track.state is State.STEPPING:
            self._cover.add(track.since, now)
        if state is State.STEPPING:
            self._opened = now if self._opened is None else min(self._opened, now)
        track.enter(state, now, present)

    def away(self, learner: int, since: float) -> None:
        """Counts the learner as FAILED from `since` (seconds) until it enters a state; inf: no longer.

        Unless that state is FAILED too, it had been in its last one all the time.
        """
        track = self._tracks.get(learner)
        if track is not None:
            track.away_since = max(since, track.since)

    def failed_since(self, learner: int, now: float) -> float:
        """Start of the FAILED state found at `now`: the time of the last message (seconds)."""
        track = self._tracks.get(learner)
        return now if track is None else min(now, track.away_since)

    def step_ended(self, learner: int, now: float, skipped: bool) -> None:
        """A step of the learner has ended; the time in STEPPING since the one before is of this one.

        If it was skipped, that counts as SKIPPING; for `uptime` the learner was stepping.
        """
        track = self._tracks.get(learner)
        if track is not None:
            track.step_ended(now, skipped)

    def job_step_ended(self, now: float, skipped: bool) -> None:
        """The same of a job that all learners take part in."""
        for track in self._tracks.values():
            track.step_ended(now, skipped)

    def window(self, now: float) -> tuple[float, float] | None:
        """The window (a, b) as of `now`, in seconds; None while no learner has stepped."""
        if self._opened is None:
            return None
        states = {track.state for track in self._tracks.values()}
        closed = State.FINISHED in states and states.isdisjoint(ACTIVE)
        return self._opened, self._last_active if closed else max(now, self._last_change)

    def goodput(self, now: float) -> float:
        """Useful chip-seconds over allocated chip-seconds, in [0, 1]."""
        return shares(self.chip_seconds(now))[0]

    def lost(self, now: float) -> dict[str, float]:
        """The share of the allocated chip-seconds lost to each of `CAUSES`, by its value."""
        return shares(self.chip_seconds(now))[1]

    def uptime(self, now: float) -> float:
        """The share of the window in which at least one learner is stepping, in [0, 1]."""
        window = self.window(now)
        if window is None or window[1] <= window[0]:
            return 1.0
        stepping = [t for t in self._tracks.values() if t.state is State.STEPPING]
        covered = self._cover.seconds([(t.since, min(t.away_since, window[1])) for t in stepping])
        return min(1.0, covered / (window[1] - window[0]))

    def blocked_seconds(self, now: float) -> float:
        """Seconds that learners waited (both WAITING states), summed over learners, not weighted by chips."""
        window = self.window(now)
        if window is None:
            return 0.0
        return sum(track.totals(*window)[1] for track in self._tracks.values())

    def chip_seconds(self, now: float) -> dict[State, float]:
        """Allocated chip-seconds inside the window, by state; all of `COUNTED` are there."""
        total = dict.fromkeys(COUNTED, 0.0)
        window = self.window(now)
        if window is not None:
            for track in self._tracks.values():
                for state, seconds in track.totals(*window)[0].items():
                    total[state] += seconds
        return total

    def states(self) -> collections.Counter[State]:
        """Number of learners in each state, of those that have entered any."""
        return collections.Counter(track.state for track in self._tracks.values() if track.state is not None)

    def alive(self, first: int) -> tuple[int, int]:
        """Number of learners neither FAILED nor away, and their total.

        Of those that have come, and of the `first`. One that has FINISHED is alive, as is one of the first
        that has not come yet.
        """
        known = [t for m, t in self._tracks.items() if m < first or t.state is not None]
        dead = sum(t.state is State.FAILED or t.away_since < math.inf for t in known)
        return len(known) - dead, len(known)


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """An allocated interval, in seconds, of a learner of `chips` chips of which `present` are in the job."""

    state: State
    start: float
    end: float
    present: int
    chips: int

    def settle(self, chip_seconds: dict[State, float]) -> float:
        """Adds its chip-seconds by state; returns the seconds that the learner waited in it."""
        seconds = max(0.0, self.end - self.start)
        chip_seconds[self.state] += self.present * seconds
        chip_seconds[State.FAILED] += (self.chips - self.present) * seconds
        return seconds if self.state in WAITING else 0.0


@dataclasses.dataclass
class _Track:
    """One learner's chips, its state, and its allocated chip-seconds by state so far.

    A span that may reach out of the window is kept whole and cut when asked about. Only spans before the
    learner's first step can start before the window; only those after its last activity can end after it.
    """

    chips: int
    present: int
    state: State | None = None
    since: float = -float("inf")
    away_since: float = math.inf
    allocated: bool = False
    stepped: float | None = None  # when it first stepped
    settled: dict[State, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    waited: float = 0.0
    step_began: float = -math.inf  # when the last step ended
    worked: float = 0.0  # chip-seconds in STEPPING since then, without those since the last change
    uncut: list[_Span] = dataclasses.field(default_factory=list)

    def enter(self, state: State, now: float, present: int) -> None:
        self.worked += self._working(now)
        if self.allocated and self.state is not None:
            self.uncut.append(self._current(now))
            del self.uncut[:-MAX_UNCUT]
        if state in ACTIVE or self.state in ACTIVE:  # the window reaches to `now` at least
            self._settle()
        self.state, self.since, self.present, self.away_since = state, now, present, math.inf
        if state is State.STEPPING and self.stepped is None:
            self.stepped = now
        self.allocated = state is not State.FINISHED and (self.allocated or state in _ALLOCATING)

    def step_ended(self, now: float, skipped: bool) -> None:
        if skipped:
            worked = self.worked + self._working(now)
            self.settled[State.STEPPING] -= worked  # of which the last may be settled only later
            self.settled[State.SKIPPING] += worked
        self.step_began, self.worked = now, 0.0

    def _working(self, now: float) -> float:
        """Chip-seconds of the present state that are of the step under way."""
        began = max(self.since, self.step_began)
        return self.present * max(0.0, now - began) if self.state is State.STEPPING else 0.0

    def totals(self, opened: float, closed: float) -> tuple[dict[State, float], float]:
        """Allocated chip-seconds by state, and seconds waited, inside the window [opened, closed]."""
        chip_seconds, waited = dict(self.settled), self.waited
        current = []
        if self.allocated and self.state is not None:
            failed_at = min(self.away_since, closed)
            current = [
                self._current(failed_at),
                _Span(State.FAILED, failed_at, closed, self.chips, self.chips),
            ]
        for span in itertools.chain(self.uncut, current):
            cut = dataclasses.replace(span, start=max(span.start, opened), end=min(span.end, closed))
            waited += cut.settle(chip_seconds)
        return chip_seconds, waited

    def _current(self, end: float) -> _Span:
        return _Span(self.state, self.since, end, self.present, self.chips)  # type: ignore[arg-type]

    def _settle(self) -> None:
        if self.stepped is not None:
            early = [span for span in self.uncut if span.start < self.stepped]
            for span in self.uncut[len(early) :]:
                self.waited += span.settle(self.settled)
            self.uncut = early
