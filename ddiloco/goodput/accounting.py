"""What goodput, uptime and lost time mean, for real runs and for simulated ones alike (docs/goodput.md).

Learner l has c_l chips and is at every moment in one `State`. The *window* [a, b] opens when any
learner first enters STEPPING. It is closed once some learner has FINISHED and none is STEPPING,
BLOCKED or RECOVERING; b is then the last moment at which one was. Until then b is the time asked about.

A learner is *allocated* from the moment it enters STEPPING or RECOVERING (or from a, if that is
later) until it enters FINISHED; dead or alive, its chips are paid for in between. STARTING counts as
RECOVERING in a learner that is allocated: its process starts anew. With T_l(s) the seconds that
learner l spends in state s while it is allocated, inside the window,

    allocated = sum over l of c_l * (T_l(STEPPING) + T_l(BLOCKED) + T_l(RECOVERING) + T_l(FAILED))
    goodput   = sum over l of c_l * T_l(STEPPING) / allocated
    lost[s]   = sum over l of c_l * T_l(s) / allocated        for s in BLOCKED, RECOVERING, FAILED
    uptime    = |union over l of the STEPPING intervals of l| / (b - a)

so that goodput + sum(lost.values()) = 1. In an empty window nothing is allocated and nothing lost:
goodput and uptime are 1.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping


class State(enum.Enum):
    """What a learner's chips do."""

    STARTING = "starting"  # before the first step: compiles, loads; not allocated yet
    STEPPING = "stepping"  # useful
    BLOCKED = "blocked"  # at its run-ahead bound: waits for peers
    RECOVERING = "recovering"  # rejoins: restores, fetches, compiles again
    FAILED = "failed"  # dead, others go on
    FINISHED = "finished"  # left after its last step; no longer allocated


CAUSES = (State.BLOCKED, State.RECOVERING, State.FAILED)
ACTIVE = (State.STEPPING, State.BLOCKED, State.RECOVERING)


class Timelines:
    """The states of all learners over time, and the shares that follow from them.

    Each learner's changes must come in the order of their times; between learners any order will do
    and gives the same figures. Memory does not grow with the number of changes, except for moments
    at which no learner steps. A `now` before the last change counts as the time of that change.
    """

    def __init__(self, chips_by_learner: Mapping[int, int]) -> None:
        """Every learner that may take part, with its number of chips.

        Raises:
          ValueError: a learner has no chip.
        """
        for learner, chips in chips_by_learner.items():
            if chips <= 0:
                raise ValueError(f"learner {learner}: has {chips} chips, but must have at least 1")
        self._tracks = {learner: _Track(chips) for learner, chips in chips_by_learner.items()}
        self._cover = _Cover()
        self._opened: float | None = None
        self._last_active = -float("inf")
        self._last_change = -float("inf")

    def enter(self, learner: int, state: State, now: float) -> None:
        """The learner is in `state` from `now` (seconds) on; entering the state it is in changes nothing.

        Raises:
          ValueError: the learner is unknown, or `now` is before its previous change.
        """
        track = self._tracks.get(learner)
        if track is None:
            raise ValueError(f"learner {learner}: is unknown; known are {sorted(self._tracks)}")
        if not now >= track.since:
            raise ValueError(
                f"learner {learner}: enters {state.name} at {now}, before its last change at {track.since}"
            )
        self._last_change = max(self._last_change, now)
        if state is State.STARTING and track.allocated:
            state = State.RECOVERING
        if state is track.state:
            return
        if track.state in ACTIVE:
            self._last_active = max(self._last_active, now)
        if track.state is State.STEPPING:
            self._cover.add(track.since, now)
        if state is State.STEPPING:
            self._opened = now if self._opened is None else min(self._opened, now)
        track.enter(state, now)

    def window(self, now: float) -> tuple[float, float] | None:
        """The window (a, b) as of `now`, in seconds; None while no learner has stepped."""
        if self._opened is None:
            return None
        states = {track.state for track in self._tracks.values()}
        closed = State.FINISHED in states and states.isdisjoint(ACTIVE)
        return self._opened, self._last_active if closed else max(now, self._last_change)

    def goodput(self, now: float) -> float:
        """Useful chip-seconds over allocated chip-seconds, in [0, 1]."""
        seconds = self._chip_seconds(now)
        allocated = sum(seconds.values())
        return seconds[State.STEPPING] / allocated if allocated > 0 else 1.0

    def lost(self, now: float) -> dict[str, float]:
        """The share of the allocated chip-seconds lost to each cause: blocked, recovering, failed."""
        seconds = self._chip_seconds(now)
        allocated = sum(seconds.values())
        return {cause.value: seconds[cause] / allocated if allocated > 0 else 0.0 for cause in CAUSES}

    def uptime(self, now: float) -> float:
        """The share of the window in which at least one learner is stepping, in [0, 1]."""
        window = self.window(now)
        if window is None or window[1] <= window[0]:
            return 1.0
        stepping = [t.since for t in self._tracks.values() if t.state is State.STEPPING]
        covered = self._cover.seconds(min(stepping, default=window[1]), window[1])
        return min(1.0, covered / (window[1] - window[0]))

    def blocked_seconds(self, now: float) -> float:
        """Seconds that learners waited for peers, summed over learners (not weighted by chips)."""
        window = self.window(now)
        if window is None:
            return 0.0
        return sum(track.seconds(*window)[State.BLOCKED] for track in self._tracks.values())

    def state(self, learner: int) -> State | None:
        """What the learner does after its last change; None before its first, or if it is unknown."""
        track = self._tracks.get(learner)
        return track.state if track else None

    def alive(self) -> int:
        """How many learners are not dead, FAILED: those that have FINISHED, or not come yet, are alive."""
        return sum(track.state is not State.FAILED for track in self._tracks.values())

    def _chip_seconds(self, now: float) -> dict[State, float]:
        total = dict.fromkeys((State.STEPPING, *CAUSES), 0.0)
        window = self.window(now)
        if window is not None:
            for track in self._tracks.values():
                for state, seconds in track.seconds(*window).items():
                    total[state] += track.chips * seconds
        return total


@dataclasses.dataclass
class _Track:
    """One learner's chips, its state, and its allocated seconds by state so far.

    An interval that may reach out of the window is kept whole, to be cut when asked about: only those
    before the learner's own first step may start before it, only a failure never returned from may end after.
    """

    chips: int
    state: State | None = None
    since: float = -float("inf")
    allocated: bool = False
    stepped: bool = False
    settled: dict[State, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys((State.STEPPING, *CAUSES), 0.0)
    )
    uncut: list[tuple[State, float, float]] = dataclasses.field(default_factory=list)

    def enter(self, state: State, now: float) -> None:
        if self.allocated and self.state is not None:
            never_back = self.state is State.FAILED and state is State.FINISHED
            if self.stepped and not never_back:
                self.settled[self.state] += now - self.since
            else:
                self.uncut.append((self.state, self.since, now))
        self.state, self.since = state, now
        self.stepped |= state is State.STEPPING
        self.allocated = state is not State.FINISHED and (
            self.allocated or state in (State.STEPPING, State.RECOVERING)
        )

    def seconds(self, opened: float, closed: float) -> dict[State, float]:
        """Allocated seconds by state inside the window [opened, closed]."""
        seconds = dict(self.settled)
        current = [(self.state, self.since, closed)] if self.allocated and self.state is not None else []
        for state, start, end in itertools.chain(self.uncut, current):
            seconds[state] += max(0.0, min(end, closed) - max(start, opened))
        return seconds


class _Cover:
    """The union of intervals, as sorted disjoint ones; intervals that abut become one."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start: float, end: float) -> None:
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def seconds(self, start: float, end: float) -> float:
        """The length of the union with one more interval, which ends no earlier than any other."""
        first = bisect.bisect_left(self._ends, start)
        if first < len(self._starts):
            start = min(start, self._starts[first])
        before = zip(self._starts[:first], self._ends[:first], strict=True)
        return math.fsum(e - s for s, e in before) + (end - start)
