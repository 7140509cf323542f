"""The event simulator: goodput, uptime and lost time of systems of any number of chips.

All jobs of all cells of the grid, for all seeds, live side by side as the lanes of one engine. Memory grows
with the lanes, not with chips or days: time passes in stretches, and after each only sums remain.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import stdtrit

from ddiloco.config import section, setting
from ddiloco.goodput.accounting import COUNTED, State, covered, shares
from ddiloco.goodput.failures import Division, FailureModel, divide
from ddiloco.goodput.jobs import Draws, Jobs, Stretch
from experiments.studies.goodput.systems import System, system_of

DAY = 24 * 3600.0  # seconds
_STRETCH = 2048  # interruptions of the busiest job, about, in one stretch of time


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The grid that is simulated."""

    num_chips: tuple[int, ...] = setting((), "chips of a whole system, one or more counts", at_least=1)
    systems: tuple[str, ...] = setting((), "data_parallel, elastic_data_parallel, decoupled:M")
    days: float = setting(30.0, "simulated time", above=0.0)
    seeds: int = setting(5, "independent repetitions, of seeds 0, 1 and so on", at_least=1)
    quorum: int | None = setting(
        None, "K: also report the time with K or more learners stepping; None: do not", at_least=1
    )
    failures: FailureModel = section(FailureModel)

    def __post_init__(self) -> None:
        for name in ("num_chips", "systems"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is empty, but must have at least one entry")
        for label in self.systems:
            try:
                system = system_of(label)
            except ValueError as error:
                raise ValueError(f"systems: {error}") from None
            if self.quorum is not None and system.name == "decoupled" and self.quorum > system.num_learners:
                raise ValueError(f"quorum: is {self.quorum}, but must be at most the learners of {label}")
            for chips in self.num_chips:
                divide(self.failures, chips, system.num_learners, system.elastic)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What became of one system on a number of chips; all figures but counts are shares in [0, 1]."""

    system: str
    num_learners: int
    num_chips: int
    goodput: float
    ci95: float | None  # half the 95% confidence interval over seeds (t distribution); None: one seed
    uptime: float
    lost: dict[str, float]  # by cause
    quorum_uptime: float | None  # share of the time with at least K learners stepping; None: not asked for
    analytic: float | None  # goodput in closed form; None: there is none

    @property
    def label(self) -> str:
        """The system's name in the settings."""
        return System(self.system, self.num_learners).label


def simulate(simulation: Simulation, progress: Callable[[float], None] = lambda share: None) -> list[Cell]:
    """Every cell of the grid, chip counts within systems. The same settings give the same figures.

    A cell's figures do not depend on what else is in the grid. `progress` is called now and then with the
    share of the time that has passed.
    """
    model, horizon = simulation.failures, simulation.days * DAY
    kinds = [(system_of(label), chips) for label in simulation.systems for chips in simulation.num_chips]
    fleets = [divide(model, chips, system.num_learners, system.elastic) for system, chips in kinds]
    lanes = _Lanes.of(kinds, fleets, simulation.seeds)
    draws = Draws(lanes.entropy)
    ledger = _Ledger(lanes, horizon, depths=(1, simulation.quorum or 1))
    source = _SampledInterruptions(model, lanes.slices, draws)
    jobs = Jobs(model, lanes.slices, lanes.elastic, source, draws, ledger.add, horizon)
    busiest = lanes.slices.max() * model.chips_per_slice * horizon / model.mtbi_seconds
    stretches = max(1, math.ceil(busiest / _STRETCH))
    for stretch in range(1, stretches + 1):
        until = horizon * stretch / stretches
        jobs.run(until)
        ledger.settle(until)
        progress(until / horizon)
    runs = zip(*[iter(range(len(kinds) * simulation.seeds))] * simulation.seeds, strict=True)
    return [
        _cell(simulation, *kind, fleet, ledger, group)
        for kind, fleet, group in zip(kinds, fleets, runs, strict=True)
    ]


def _cell(
    simulation: Simulation, system: System, chips: int, fleet: Division, ledger: _Ledger, runs: Sequence[int]
) -> Cell:
    """The figures of a cell from its runs, one for each seed."""
    horizon, seeds = simulation.days * DAY, len(runs)
    seconds = ledger.slice_seconds(runs)
    seconds[State.STANDBY] = np.full(seeds, fleet.spares * horizon)
    by_seed = [shares({state: float(values[i]) for state, values in seconds.items()}) for i in range(seeds)]
    goodputs = [goodput for goodput, _ in by_seed]
    spread = float(np.std(goodputs, ddof=1)) if seeds > 1 else math.nan
    stepping = ledger.seconds_stepping[:, runs].mean(axis=1) / horizon
    asked = simulation.quorum is not None and system.name == "decoupled"
    return Cell(
        system=system.name,
        num_learners=system.num_learners,
        num_chips=chips,
        goodput=float(np.mean(goodputs)),
        ci95=float(stdtrit(seeds - 1, 0.975)) * spread / math.sqrt(seeds) if seeds > 1 else None,
        uptime=min(1.0, float(stepping[0])),
        lost={cause: float(np.mean([lost[cause] for _, lost in by_seed])) for cause in by_seed[0][1]},
        quorum_uptime=min(1.0, float(stepping[1])) if asked else None,
        analytic=system.analytic_goodput(simulation.failures, chips),
    )


class _SampledInterruptions:
    """Interruptions of the slices that are in a job, at the rate of the failure model."""

    def __init__(self, model: FailureModel, slices: np.ndarray, draws: Draws) -> None:
        """`slices`: int [lanes], in each job at time 0."""
        self._model = model
        self._draws = draws
        self.next = np.full(len(slices), np.inf)
        self.resized(np.arange(len(slices)), np.zeros(len(slices)), slices)

    def take(self, lanes: np.ndarray) -> tuple[np.ndarray, None]:
        return self.next[lanes] + self._draws.take(lanes) * self._model.return_seconds, None

    def resized(self, lanes: np.ndarray, now: np.ndarray, slices: np.ndarray) -> None:
        """As of `interruptions.Source`: exponential times have no memory, so they are sampled anew."""
        chips = slices * self._model.chips_per_slice
        self.next[lanes] = now + self._draws.take(lanes) * self._model.mtbi_seconds / chips


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """The jobs of all runs, those of a run side by side; a run is a cell with one seed."""

    slices: np.ndarray
    elastic: np.ndarray
    run: np.ndarray  # of each lane
    entropy: list[tuple[int, ...]]

    @classmethod
    def of(cls, kinds: Sequence[tuple[System, int]], fleets: Sequence[Division], seeds: int) -> _Lanes:
        slices, elastic, runs, entropy = [], [], [], []
        for cell, ((system, chips), fleet) in enumerate(zip(kinds, fleets, strict=True)):
            for seed in range(seeds):
                for job, count in enumerate(fleet.slices_by_job):
                    slices.append(count)
                    elastic.append(system.elastic)
                    runs.append(cell * seeds + seed)
                    entropy.append((seed, chips, system.num_learners, int(system.elastic), job))
        return cls(np.array(slices), np.array(elastic), np.array(runs), entropy)


class _Ledger:
    """Sums over all jobs before the horizon: seconds by state, and those in which K jobs of a run stepped."""

    def __init__(self, lanes: _Lanes, horizon: float, depths: tuple[int, ...]) -> None:
        """`depths`: the numbers of stepping jobs whose time is asked for."""
        self._lanes = lanes
        self._horizon = horizon
        self._depths = depths
        self._seconds = {state: np.zeros(len(lanes.slices)) for state in COUNTED}
        self._spans: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # lanes, starts, ends: STEPPING
        self.seconds_stepping = np.zeros((len(depths), lanes.run[-1] + 1))  # [depths, runs]

    def add(self, stretch: Stretch) -> None:
        """Chips faster than the slowest of their job wait for it at every step."""
        lanes, state, starts, ends, slices, speed = stretch
        starts, ends = np.minimum(starts, self._horizon), np.minimum(ends, self._horizon)
        seconds = ends - starts
        inside = seconds * slices
        if state is State.STEPPING:
            self._spans.append((lanes, starts, ends))
            if not isinstance(speed, float):
                self._seconds[State.WAITING_FOR_PEERS][lanes] += inside * (1.0 - speed)
                inside = inside * speed
        self._seconds[state][lanes] += inside

    def settle(self, until: float) -> None:
        """Every job has come to `until`: turns what was kept of the time before into sums."""
        lanes, starts, ends = (np.concatenate(parts) for parts in zip(*self._spans, strict=True))
        later = ends > until
        self._spans = [(lanes[later], np.maximum(starts[later], until), ends[later])]
        starts, ends = np.minimum(starts, until), np.minimum(ends, until)
        order = np.argsort(self._lanes.run[lanes], kind="stable")
        runs, starts, ends = self._lanes.run[lanes][order], starts[order], ends[order]
        edges = np.searchsorted(runs, np.arange(self.seconds_stepping.shape[1] + 1))
        for run, (first, last) in enumerate(itertools.pairwise(edges)):
            for place, depth in enumerate(self._depths):
                if place and depth == self._depths[0]:
                    self.seconds_stepping[place, run] = self.seconds_stepping[0, run]
                    continue
                since, to = covered(starts[first:last], ends[first:last], depth)
                self.seconds_stepping[place, run] += (to - since).sum()

    def slice_seconds(self, runs: Sequence[int]) -> dict[State, np.ndarray]:
        """Seconds of slices by state, each an array [runs]; what was not in a job was FAILED."""
        of_run = [self._lanes.run == run for run in runs]
        seconds = {s: np.array([values[own].sum() for own in of_run]) for s, values in self._seconds.items()}
        allocated = np.array([self._lanes.slices[own].sum() * self._horizon for own in of_run])
        rest = allocated - sum(seconds.values())
        seconds[State.FAILED] = np.where(rest > 1e-9 * allocated, rest, 0.0)  # else it is rounding's
        return seconds
