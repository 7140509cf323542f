"""Random schedules of the protocol explored in a second, every event checked, on one core.

Seconds are of processor time, of the one thread that there is: what else the machine does changes little.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator

from ddiloco.telemetry.progress import Progress
from ddiloco.virtual.calendar import Calendar
from experiments.bench.measuring import row
from experiments.studies.schedules.ledger import Violation
from experiments.studies.schedules.random_schedule import explore, schedule_of

SAMPLED = 10  # one of this many schedules also runs for the reference and for the limit


def run(
    quick: bool = False,
    schedules: int = 10_000,
    first: int = 0,
    seed: int | None = None,
    fair: bool = False,
) -> list[dict]:
    """Explores so many seeds (`quick`: at most 100) from `first` on; or replays one `seed`, without rows.

    If `fair`, of the schedules in which nothing goes wrong, and everybody's work must be merged.

    Returns:
      Rows in schedules and in calendar events a second, of every tenth schedule. `reference` is the same
      schedules without timeline and checks, `limit` a calendar with as many entries that do nothing, both run
      right after each.

    Raises:
      Violation: a rule was broken; the message starts with the command that replays the schedule.
    """
    if seed is not None:
        replay(seed, fair)
        return []
    count = min(100, schedules) if quick else schedules
    started = time.process_time()
    seconds = {"checked": 0.0, "unchecked": 0.0, "bare": 0.0}
    events = sampled = sampled_events = 0
    states: set[int] = set()
    for number in _shown(range(first, first + count)):
        begun = time.process_time()
        explored = explore(number, fair)
        took = time.process_time() - begun
        events += explored.events
        states |= explored.states
        if (number - first) % SAMPLED == 0:
            sampled, sampled_events = sampled + 1, sampled_events + explored.events
            seconds["checked"] += took
            seconds["unchecked"] += _timed(schedule_of(number, fair, checked=False).run)
            seconds["bare"] += _timed(lambda events=explored.events: _bare(events))
    spent = time.process_time() - started
    seen = f"{events} events, {len(states)} distinct states of the syncer"
    print(f"{count} schedules, {seen} in {spent:.0f} s of processor time:")
    print("every rule held after every event")
    counts = (("schedules", sampled, "schedules/s"), ("schedule_events", sampled_events, "events/s"))
    return [row(name, *(amount / s for s in seconds.values()), unit) for name, amount, unit in counts]


def replay(seed: int, fair: bool = False) -> None:
    """Runs one schedule and prints its plan and its last events; raises Violation if a rule was broken."""
    schedule = schedule_of(seed, fair)
    try:
        schedule.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    finally:
        print("\n".join([*schedule.history(), ""]))
    print(f"seed {seed}: every rule held after each of {schedule.events} events")


def _shown(seeds: range) -> Iterator[int]:
    """The seeds, with a line that says how many were explored, and garbage that is collected between them."""
    progress, shown = Progress(), time.monotonic()
    with _seldom_collected():
        for number, seed in enumerate(seeds):
            if time.monotonic() >= shown + progress.every:
                shown = time.monotonic()
                progress.show([f"{number} of {len(seeds)} schedules"])
            if number % SAMPLED == 0:
                gc.collect()
            yield seed
    progress.end()


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """No collection but those asked for: a schedule's objects are many, and most stay until its end."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _timed(call) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def _bare(events: int) -> None:
    """A calendar of twenty entries at a time, each of which enters its successor."""
    calendar, rng = Calendar(), random.Random(0)

    def entry() -> None:
        calendar.after(rng.expovariate(1.0), entry)

    for _ in range(20):
        entry()
    while calendar.happened < events:
        calendar.advance()
