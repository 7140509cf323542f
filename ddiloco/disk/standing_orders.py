"""What an operator has asked for that outlasts the syncer: who is drained, whether the run is over."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from ddiloco.disk import array_file
from ddiloco.disk.run_mark import RunMarkError

NAME = "operator.json"


class StandingOrders(NamedTuple):
    """As the last command left it."""

    stopped: bool = False  # the run; whatever an engine starts then does not go on with it
    drained: tuple[int, ...] = ()  # learners that are sent away until they are added again

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
        return StandingOrders(bool(values["stopped"]), tuple(map(int, values["drained"])))
    except FileNotFoundError:
        return StandingOrders()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunMarkError(f"{path}: cannot be used: {type(error).__name__}") from None
