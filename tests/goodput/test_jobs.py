"""The event engine: lives told by hand, any life against one lived second by second, and Timelines."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.goodput.accounting import State, Timelines
from ddiloco.goodput.failures import FailureModel, divide
from ddiloco.goodput.jobs import (
    Draws,
    Interruption,
    Jobs,
    ListedInterruptions,
    draw_interruptions,
    job_changes,
    job_chips,
)
from experiments.studies.goodput.simulator import _Lanes, _Ledger
from experiments.studies.goodput.systems import System
from tests.long import times

STEPPING, DETECTING, RECONFIGURING = State.STEPPING, State.DETECTING, State.RECONFIGURING
REPLAYING, STANDBY, FAILED = State.REPLAYING, State.STANDBY, State.FAILED

ROUND = FailureModel(
    chips_per_slice=4,
    detection_seconds=10.0,
    downscale_seconds=5.0,
    upscale_seconds=20.0,
    upscale_wait_seconds=60.0,
    restart_seconds=30.0,
    spare_share=0.25,
    step_seconds=0.0,
)


def told(interruptions, jobs=1, chips=12, elastic=True, horizon=1000.0, model=ROUND):
    """(time, state, chips) of a single job, (time, job, state, chips) of several."""
    interruptions = [Interruption(*one) for one in interruptions]
    changes = job_changes(model, interruptions, chips, jobs, 0, horizon, elastic)
    rows = [(c.time, c.job, c.state, c.chips) for c in changes]
    return [(time, state, n) for time, _, state, n in rows] if jobs == 1 and elastic else rows


def test_an_upscale_that_came_due_in_a_pause_after_its_reconfiguration_begins_at_once():
    model = dataclasses.replace(ROUND, step_seconds=1e-9, upscale_wait_seconds=0.0)
    changes = told([(100.0, 0, 115.0 + 1e-12), (200.0, 1, 2000.0)], model=model)
    assert [state for _, state, _ in changes] == [
        STEPPING, DETECTING, RECONFIGURING, REPLAYING, RECONFIGURING, STEPPING, *
        [DETECTING, RECONFIGURING, REPLAYING, STEPPING],
    ]  # fmt: skip


def test_a_job_without_elasticity_stands_still_as_a_whole_and_has_all_its_slices_again():
    assert told([(100.0, 0, 900.0), (120.0, 1, 900.0), (150.0, 3, 900.0)], chips=16, elastic=False) == [
        (0.0, 0, STEPPING, 12),
        (0.0, 1, STANDBY, 4),
        (100.0, 0, DETECTING, 12),
        (110.0, 0, RECONFIGURING, 12),
        (140.0, 0, STEPPING, 12),
    ]


def test_the_same_interruptions_strike_one_large_job_or_one_of_several():
    interruptions = [(100.0, 1, 2000.0), (200.0, 2, 2000.0)]
    assert [(time, n) for time, state, n in told(interruptions) if state is DETECTING] == [
        (100.0, 8),
        (200.0, 4),
    ]
    # Three slices of two jobs: the first has two of them, and the second loses its only one.
    assert told(interruptions, jobs=2) == [
        (0.0, 0, STEPPING, 8),
        (0.0, 1, STEPPING, 4),
        (100.0, 0, DETECTING, 4),
        (110.0, 0, RECONFIGURING, 4),
        (115.0, 0, STEPPING, 4),
        (200.0, 1, FAILED, 0),
    ]


def test_the_lost_part_of_a_step_is_done_again():
    model = dataclasses.replace(ROUND, step_seconds=8.0)
    interruptions = [(100.0 * i, 0, 100.0 * i + 1) for i in range(1, 400)]
    changes = told(interruptions, horizon=1e5, model=model)
    pairs = itertools.pairwise(changes)
    replayed = np.array([after - time for (time, state, _), (after, *_) in pairs if state is REPLAYING])
    assert len(replayed) == 399
    assert (replayed.min() >= 0, replayed.max() < 8) == (True, True)
    assert replayed.mean() == pytest.approx(4.0, abs=4 * 8 / np.sqrt(12 * 399))


class Ticks:
    """One elastic job of whole-second times, lived second by second after the rules in words."""

    def __init__(self, slices, strikes, model):
        self.inside, self.back = set(range(slices)), {}
        self.strikes, self.model = strikes, model
        self.state, self.until = STEPPING, None

    def run(self, horizon):
        """What it does in each second: state and slices in the job."""
        lived = []
        for now in range(horizon):
            self.change(now)
            for one in [one for one in self.strikes if one.time == now]:
                self.strike(one, now)
                self.change(now)
            self.change(now)
            if self.state is STEPPING and self.upscale_due(now):
                self.enter(RECONFIGURING, now, self.model.upscale_seconds)
                self.change(now)
            lived.append((self.state, len(self.inside)))
        return lived

    def enter(self, state, now, seconds=None):
        self.state, self.until = state, None if seconds is None else now + seconds

    def upscale_due(self, now):
        return bool(self.back) and min(self.back.values()) + self.model.upscale_wait_seconds <= now

    def strike(self, one, now):
        self.back[one.slice] = one.returns_at
        if one.slice not in self.inside:
            return
        self.inside.remove(one.slice)
        if not self.inside:
            self.enter(FAILED, now)
        elif self.state is STEPPING:
            self.enter(DETECTING, now, self.model.detection_seconds)

    def admit(self, now):
        ready = {number for number, back in self.back.items() if back <= now}
        self.inside |= ready
        for number in ready:
            del self.back[number]

    def change(self, now):
        """All that ends by now; a strike at the same time comes after it."""
        while True:
            if self.state is DETECTING and self.until == now:
                self.enter(RECONFIGURING, now, self.model.downscale_seconds)
            elif self.state is RECONFIGURING and self.until == now:
                self.admit(now)
                self.enter(STEPPING, now)
            elif self.state is FAILED and min(self.back.values()) <= now:
                self.admit(now)
                self.enter(RECONFIGURING, now, self.model.restart_seconds)
            else:
                return


@st.composite
def lives(draw):
    """A model of whole seconds, a number of slices, and what strikes them; each slice once at a time."""
    seconds = st.integers(0, 12)
    model = dataclasses.replace(
        ROUND,
        detection_seconds=float(draw(seconds)),
        downscale_seconds=float(draw(seconds)),
        upscale_seconds=float(draw(seconds)),
        upscale_wait_seconds=float(draw(st.integers(1, 30))),
        restart_seconds=float(draw(seconds)),
    )
    slices = draw(st.integers(1, 4))
    interruptions = []
    for number in range(slices):
        now = 0
        for up, down in draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=5)):
            interruptions.append(Interruption(float(now + up), number, float(now + up + down)))
            now += up + down
    return model, slices, sorted(interruptions, key=lambda one: (one.time, one.slice))


@settings(max_examples=times(50, 300))
@given(lives())
def test_any_life_is_the_one_that_is_lived_second_by_second(life):
    model, slices, interruptions = life
    horizon = 400
    changes = job_changes(model, interruptions, 4 * slices, 1, 0, float(horizon), elastic=True)
    lived = []
    for change, after in zip(changes, [*changes[1:], None], strict=True):
        end = horizon if after is None else int(after.time)
        lived += [(change.state, change.chips // 4)] * (end - int(change.time))
    assert lived == Ticks(slices, interruptions, model).run(horizon)


@settings(max_examples=times(12, 40))
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.floats(0.2, 3.0))
def test_the_simulators_sums_are_those_of_timelines_fed_with_the_same_changes(seed, jobs, elastic, hours):
    model = FailureModel(mtbi_years=1e-4 * hours, chips_per_slice=2, return_seconds=500.0)
    chips, horizon = 24, 20_000.0
    interruptions = draw_interruptions(model, chips, seed, horizon)
    lines = Timelines(job_chips(model, chips, jobs, elastic))
    for change in job_changes(model, interruptions, chips, jobs, seed, horizon, elastic):
        lines.enter(change.job, change.state, change.time, change.chips)

    fleet = divide(model, chips, jobs, elastic)
    kind = (System("decoupled" if elastic else "data_parallel", jobs), chips)
    lanes = dataclasses.replace(_Lanes.of([kind], [fleet], 1), entropy=[(seed, job) for job in range(jobs)])
    ledger = _Ledger(lanes, horizon, (1, 2))
    source = ListedInterruptions(fleet, interruptions)
    engine = Jobs(model, lanes.slices, lanes.elastic, source, Draws(lanes.entropy), ledger.add, horizon)
    for until in (5_000.0, 12_000.0, horizon):
        engine.run(until)
        ledger.settle(until)
    seconds = {state: 2 * values[0] for state, values in ledger.slice_seconds([0]).items()}
    seconds[STANDBY] = 2 * fleet.spares * horizon
    expected = lines.chip_seconds(horizon)
    assert seconds == pytest.approx(expected, rel=1e-9, abs=1e-4)
    assert sum(seconds.values()) == pytest.approx(chips * horizon)
    assert ledger.seconds_stepping[0, 0] / horizon == pytest.approx(lines.uptime(horizon), rel=1e-9)
    assert ledger.seconds_stepping[1, 0] <= ledger.seconds_stepping[0, 0]
