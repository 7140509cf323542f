"""What outlasts the syncer: whom an operator has drained, and whether the run was stopped or has failed."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import NamedTuple

from ddiloco.storage import array_file
from ddiloco.storage.run_mark import RunMarkError

NAME = "operator.json"


class StandingOrders(NamedTuple):
    """As the last command left it."""

    stopped: bool = False  # the run; whatever an engine starts then does not go on with it
    drained: tuple[int, ...] = ()  # learners that are sent away until they are added again
    failure: str | None = None  # why the run was stopped, if not by its operator

    @property
    def over(self) -> str | None:
        """How the run came to be stopped; None: it is not."""
        if not self.stopped:
            return None
        return f"has failed: {self.failure}" if self.failure else "was stopped by its operator"

    def drain(self, learner: int) -> StandingOrders:
        """With the learner drained."""
        return self._replace(drained=(*self.add(learner).drained, learner))

    def add(self, learner: int) -> StandingOrders:
        """With the learner drained no longer."""
        return self._replace(drained=tuple(m for m in self.drained if m != learner))

    def save(self, folder: pathlib.Path) -> None:
        """Makes it durable in the syncer's folder; raises OSError."""
        array_file.replace(folder / NAME, [json.dumps(self._asdict()).encode()])


def load(folder: pathlib.Path) -> StandingOrders:
    """What was said, nothing at first; raises RunMarkError: the file cannot be used."""
    path = folder / NAME
    try:
        values = json.loads(path.read_text())
        stopped, failure = bool(values["stopped"]), values.get("failure")
        return StandingOrders(stopped, tuple(map(int, values["drained"])), failure and str(failure))
    except FileNotFoundError:
        return StandingOrders()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunMarkError(f"{path}: cannot be used: {type(error).__name__}") from None


def fail(folder: pathlib.Path, why: str) -> None:
    """Stops the run for good, for a reason: another process of it would fail likewise. Raises OSError."""
    with contextlib.suppress(RunMarkError):
        load(folder)._replace(stopped=True, failure=why).save(folder)


def has_failed(folder: pathlib.Path) -> bool:
    """Whether the run was stopped so."""
    with contextlib.suppress(RunMarkError):
        orders = load(folder)
        return orders.stopped and orders.failure is not None
    return False
