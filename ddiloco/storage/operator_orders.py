"""An operator's orders, for all shards of the syncer and those that start later.

One file, which any shard may change and all of them watch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ddiloco.storage import array_file
from ddiloco.storage.run_mark import RunMarkError

NAME = "operator.json"
_LOCK = "operator.lock"


class StandingOrders(NamedTuple):
    """The orders after the last command."""

    stopped: bool = False  # the run; processes that an engine starts later do not resume it
    drained: tuple[int, ...] = ()  # learners that are refused until they are added again
    failure: str | None = None  # why the run was stopped, if not by its operator
    evicted: tuple[int, ...] = ()  # learners in the order in which they were evicted; one may be there twice
    timing: Mapping[str, Any] = {}  # settings of config.sync that changed, by name
    reason: str = ""  # of their last change
    limits: Mapping[int, float] = {}  # by learner, bytes a second of its link, each way

    @property
    def over(self) -> str | None:
        """The reason for which the run was stopped; None: it was not."""
        if not self.stopped:
            return None
        return f"has failed: {self.failure}" if self.failure else "was stopped by its operator"

    def drain(self, learner: int) -> StandingOrders:
        """With the learner drained."""
        return self._replace(drained=(*self.add(learner).drained, learner))

    def add(self, learner: int) -> StandingOrders:
        """With the learner drained no longer."""
        return self._replace(drained=tuple(m for m in self.drained if m != learner))

    def set_timing(self, changes: Mapping[str, Any], reason: str) -> StandingOrders:
        """With these settings of config.sync changed."""
        return self._replace(timing={**self.timing, **changes}, reason=reason)

    def limit(self, learners: Iterable[int], rate: float | None) -> StandingOrders:
        """With the links of these learners limited to so many bytes a second; None: no longer."""
        named = {*learners}
        others = {m: kept for m, kept in self.limits.items() if m not in named}
        return self._replace(limits=others | ({} if rate is None else dict.fromkeys(sorted(named), rate)))

    def save(self, folder: pathlib.Path) -> None:
        """Makes it durable in the syncer's folder; raises OSError."""
        array_file.replace(folder / NAME, [json.dumps(self._asdict()).encode()])


def shown_timing(changes: Mapping[str, Any]) -> str:
    """The settings as `sync.interval=12, sync.quorum=2`."""
    return ", ".join(f"sync.{name}={value}" for name, value in changes.items())


def load(folder: pathlib.Path) -> StandingOrders:
    """The orders so far, empty at first; raises RunMarkError: the file cannot be used."""
    path = folder / NAME
    try:
        values = json.loads(path.read_text())
        stopped, failure = bool(values["stopped"]), values.get("failure")
        numbers = tuple(map(int, values["drained"])), tuple(map(int, values.get("evicted", ())))
        timing, why = dict(values.get("timing", {})), str(values.get("reason", ""))
        limits = {int(m): float(rate) for m, rate in values.get("limits", {}).items()}
        return StandingOrders(stopped, numbers[0], failure and str(failure), numbers[1], timing, why, limits)
    except FileNotFoundError:
        return StandingOrders()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunMarkError(f"{path}: cannot be used: {type(error).__name__}") from None


def change(folder: pathlib.Path, to: Callable[[StandingOrders], StandingOrders]) -> StandingOrders:
    """Changes the orders, also while other shards do; returns the new ones.

    Raises OSError, or RunMarkError: the present orders cannot be read.
    """
    with _alone(folder):
        before = load(folder)
        after = to(before)
        if after != before:
            after.save(folder)
    return after


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """One process at a time; a disk without locks has one shard."""
    with (folder / _LOCK).open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fail(folder: pathlib.Path, why: str) -> None:
    """Stops the run for good, since a restarted process would fail again. Raises OSError."""
    with contextlib.suppress(RunMarkError):
        change(folder, lambda orders: orders._replace(stopped=True, failure=why))


def has_failed(folder: pathlib.Path) -> bool:
    """Whether `fail` has stopped the run."""
    with contextlib.suppress(RunMarkError):
        orders = load(folder)
        return orders.stopped and orders.failure is not None
    return False
