"""The tapes of a virtual fleet."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

from ddiloco.disk.tape.recorder import LearnerTape
from ddiloco.observe import records
from ddiloco.outer.global_model import GlobalModel, pieces_sha256
from ddiloco.protocol import actions, events
from ddiloco.protocol.state import SyncerState
from ddiloco.roles.learner_arrays import Equipment
from ddiloco.roles.taping import Tapes
from ddiloco.settings.experiment import Experiment
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.ports import Observer


class FleetTapes(Observer):
    """Writes the tapes of a fleet; their clock and wall clock are virtual time."""

    def __init__(
        self,
        workdir: pathlib.Path | None,
        experiment: Experiment,
        model: GlobalModel,
        equipment: Sequence[Equipment],
        record: Callable[[records.Record], None],
    ) -> None:
        """`record` hears alarms. Without a workdir, or where the settings say so, nothing is written."""
        self._tapes = Tapes(workdir, experiment, model.layout, record, clock=lambda: 0.0, wall=lambda: 0.0)
        self._model, self._equipment = model, equipment
        self._syncer = self._tapes.syncer(SyncerState.initial(model.layout.num_fragments), model)
        self._versions = [0] * model.layout.num_fragments  # that the tape has
        self._learners: dict[int, tuple[int, LearnerTape]] = {}  # by number: newest process and its tape

    def syncer_handled(
        self, event: events.SyncerEvent, out: Sequence[actions.SyncerAction], now: float
    ) -> None:
        """The syncer's core took an event and answered with these actions."""
        self._syncer.heard(event, out, now)
        if isinstance(event, events.MergeFinished) and self._syncer.on:
            p, (version, pieces) = event.round.fragment, self._model.fragment(event.round.fragment)
            if version > self._versions[p]:  # else nothing was merged
                self._versions[p] = version
                self._syncer.committed(p, version, pieces_sha256(pieces))

    def learner_handled(
        self,
        learner: VirtualLearner,
        event: events.LearnerEvent,
        out: Sequence[actions.LearnerAction],
        now: float,
    ) -> None:
        """The core of a learner took an event and answered with these actions."""
        tape = self._tape(learner.number, learner.process)
        tape.heard(event, now)
        if any(isinstance(action, actions.AdoptAll) for action in out):
            tape.adopted(fresh=True, origin=None)

    def end(self) -> None:
        """The run is over."""
        for _, tape in self._learners.values():
            tape.close()
        self._syncer.end([self._model.fragment(p)[0] for p in range(self._model.layout.num_fragments)])

    def _tape(self, learner: int, process: int) -> LearnerTape:
        newest, tape = self._learners.get(learner, (None, None))
        if newest != process:
            if tape is not None:
                tape.close()
            tape = self._tapes.learner(learner, process, self._equipment[learner])
            self._learners[learner] = process, tape
        return tape
