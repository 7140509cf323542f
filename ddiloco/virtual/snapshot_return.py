"""A virtual run that goes on from a snapshot with other settings: everybody comes back with what it held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.disk.snapshots.parts import learner_part
from ddiloco.disk.snapshots.store import Snapshot
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.state import SyncerState
from ddiloco.roles.learner_arrays import Equipment, TrainingArrays
from ddiloco.roles.returning import Origin
from ddiloco.roles.taping import FleetTapes
from ddiloco.settings.experiment import Experiment
from ddiloco.virtual.fleet import INCARNATIONS_EACH, Fleet
from ddiloco.virtual.from_settings import lives
from ddiloco.virtual.learner_process import VirtualLearner
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
        return TrainingArrays(equipment, erred, self._origin.donated())

    def restore(self, model: GlobalModel) -> SyncerState:
        """Puts the model where it was; what the syncer's core begins from."""
        self._origin.start.restore(model)
        return self._origin.start.state

    def begin(
        self, fleet: Fleet, equipment: Sequence[Equipment], observer: Observer, tapes: FleetTapes
    ) -> None:
        """Has a fleet, into which no lives are entered yet, begin where the snapshot was taken.

        Raises:
          DataError: the positions are of other data.
        """
        origin = self._origin
        fleet.syncer.begin_from(origin.start.state)
        positions = origin.positions(len(equipment))
        for m, position in enumerate(positions):
            fleet.places[m].starts = 1 + origin.incarnation(m) // INCARNATIONS_EACH
            if position is not None:
                equipment[m].batches.set_state(position)
        for m, part in self._parts.items():
            for clock, tokens, time in part["untold"]:
                observer.stepped(m, clock, tokens, {}, time)
        come = functools.partial(self._come, fleet, equipment, positions, tapes)
        fleet.live(lives(self._experiment), self.since, come)

    def _come(
        self,
        fleet: Fleet,
        equipment: Sequence[Equipment],
        positions: Sequence[Any],
        tapes: FleetTapes,
        learner: int,
    ) -> VirtualLearner:
        returning = self._origin.learner(learner, positions[learner], equipment[learner].transfer)
        if returning is None:
            return fleet.join(learner)
        load = functools.partial(returning.load, mixing=self._experiment.sync.mixing)
        incarnation, returned = self._origin.incarnation(learner), returning.returned
        tapes.came_back(learner, incarnation, returned)
        return fleet.come_back(learner, incarnation, load, returned.clock, returned.fragments)
