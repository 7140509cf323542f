"""A virtual run that goes on from a snapshot with other settings: everybody comes back with what it held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import GlobalModel
from ddiloco.runtime.delivery import Pieces
from ddiloco.runtime.experiment import Experiment
from ddiloco.runtime.learner_arrays import Equipment, TrainingArrays
from ddiloco.runtime.snapshots.recording import learner_part
from ddiloco.runtime.snapshots.returning import Origin
from ddiloco.runtime.snapshots.store import Snapshot
from ddiloco.runtime.virtual_fleet import lives
from ddiloco.virtual.fleet import INCARNATIONS_EACH, Fleet
from ddiloco.virtual.learner import VirtualLearner
from ddiloco.virtual.ports import Observer


class VirtualReturn:
    """What such a run begins with.

    Attributes:
      since: virtual seconds at which it begins: when the last learner was recorded.
    """

    def __init__(self, snapshot: Snapshot, experiment: Experiment, layout: FragmentLayout) -> None:
        """Raises ConfigError if the snapshot holds no arrays, and else as `Origin` does."""
        if snapshot.header["layout"] is None:
            raise ConfigError("config.virtual.arrays: was false, is true: the snapshot holds no arrays")
        self._experiment = experiment
        self._origin = Origin(snapshot, experiment, layout)
        self._parts = {m: snapshot.part(learner_part(m)).state for m in self._origin.learners}
        self.since = max([snapshot.header["time"], *(part["time"] for part in self._parts.values())])
        self._donated = set(range(experiment.sync.num_learners)) - set(self._parts)

    def arrays(
        self, learner: int, equipment: Equipment, erred: Callable[[int, list[str]], None]
    ) -> TrainingArrays:
        """The arrays of a learner's next process; one without a part begins with a donated inner state."""
        if learner not in self._donated:
            return TrainingArrays(equipment, erred)
        self._donated.discard(learner)
        donor = self._origin.donated()
        return _DonatedArrays(equipment, erred, None if donor is None else donor.arrays)

    def begin(
        self, fleet: Fleet, model: GlobalModel, equipment: Sequence[Equipment], observer: Observer
    ) -> None:
        """Has a fleet, into which no lives are entered yet, begin where the snapshot was taken.

        Raises:
          DataError: the positions are of other data.
        """
        origin = self._origin
        origin.start.restore(model)
        fleet.syncer.begin_from(origin.start.state)
        positions = origin.positions(len(equipment))
        for m, position in enumerate(positions):
            fleet.places[m].starts = 1 + origin.incarnation(m) // INCARNATIONS_EACH
            if position is not None:
                equipment[m].batches.set_state(position)
        for m, part in self._parts.items():
            for clock, tokens, time in part["untold"]:
                observer.stepped(m, clock, tokens, {}, time)
        come = functools.partial(self._come, fleet, equipment, positions)
        fleet.live(lives(self._experiment), self.since, come)

    def _come(
        self, fleet: Fleet, equipment: Sequence[Equipment], positions: Sequence[Any], learner: int
    ) -> VirtualLearner:
        returning = self._origin.learner(learner, positions[learner], equipment[learner].transfer)
        if returning is None:
            return fleet.join(learner)
        load = functools.partial(returning.load, mixing=self._experiment.sync.mixing)
        incarnation = self._origin.incarnation(learner)
        return fleet.come_back(learner, incarnation, load, returning.clock, returning.fragments)


class _DonatedArrays(TrainingArrays):
    """Adopts its first welcome with another learner's inner optimizer state."""

    def __init__(
        self,
        equipment: Equipment,
        erred: Callable[[int, list[str]], None],
        inner: Sequence[np.ndarray] | None,
    ) -> None:
        super().__init__(equipment, erred)
        self._donated = inner

    def adopt(self, fragments: Sequence[Pieces], inner: Sequence[np.ndarray] | None = None) -> None:
        super().adopt(fragments, self._donated if inner is None else inner)
        self._donated = None
