"""The tapes of a run's actors, with headers that say what their numbers follow from."""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.disk.tape.header import Header, Machine, Returned, SnapshotName
from ddiloco.disk.tape.reading import FOLDER, learner_tape, next_syncer, syncer_tape
from ddiloco.disk.tape.recorder import LearnerTape, SyncerTape
from ddiloco.observe import records
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import GlobalModel, pieces_sha256
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.state import SyncerState
from ddiloco.roles.learner_arrays import Batches, Equipment
from ddiloco.settings.experiment import Experiment, to_json

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "grain", "ddiloco")
_DECISIVE = ("algorithm", "seed", "model", "data", "train", "inner", "sync", "outer", "mesh")
_FREE = {  # of these, what may differ from process to process
    "data": {"data_dir", "prefetch"},
    "train": {"steps_in_flight", "min_step_seconds", "tokens"},
}


class Tapes:
    """Makes the tapes of a run; none where its settings ask for none, or it has no folder."""

    def __init__(
        self,
        workdir: pathlib.Path | None,
        experiment: Experiment,
        layout: FragmentLayout,
        record: Callable[[records.Record], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        goes_on: bool = False,
    ) -> None:
        """`clock`: seconds that the cores are timed by. `wall`: unix seconds. `record` hears alarms.

        `goes_on`: the tapes of the processes that are there, of one syncer among them, are written on.
        """
        self.folder = None if workdir is None or not experiment.tape.enabled else workdir / FOLDER
        self._experiment, self._layout, self._record = experiment, layout, record
        self._clock, self._wall = clock, wall
        self._goes_on = goes_on
        if goes_on and self.folder is not None and not syncer_tape(self.folder, 1).exists():
            self.folder = None
            told = "up to the snapshot the run has no whole tape, so it keeps none from there on"
            record(records.Alarm(told, wall()))

    def learner(
        self, learner: int, process: int, equipment: Equipment, returned: Returned | None = None
    ) -> LearnerTape:
        """The tape of a learner's process, before its first batch.

        Args:
          learner: its number.
          process: its first incarnation.
          equipment: its own.
          returned: with what it comes back from a snapshot, if it does.
        """
        if self.folder is None:
            return LearnerTape(learner, process)
        machine = machine_of(equipment.program.mesh)
        position = _position(equipment.batches)
        header = self._header("learner", learner, process, machine, position=position, returned=returned)
        path = learner_tape(self.folder, learner, process)
        return LearnerTape(learner, process, path, header, self._record, self._goes_on and path.exists())

    def syncer(
        self, state: SyncerState, model: GlobalModel, resumed_from: SnapshotName | None = None
    ) -> SyncerTape:
        """The tape of a syncer's process.

        Args:
          state: what its core begins from.
          model: has the fragments that it begins from.
          resumed_from: the snapshot that the run goes on from, if it does.
        """
        if self.folder is None:
            return SyncerTape()
        sha256 = tuple(pieces_sha256(model.fragment(p)[1]).hex() for p in range(model.layout.num_fragments))
        process = 1 if self._goes_on else next_syncer(self.folder)
        begun = {"state": state, "sha256": sha256, "resumed_from": resumed_from}
        header = self._header("syncer", None, process, machine_of(None), **begun)
        return SyncerTape(syncer_tape(self.folder, process), header, self._record, self._goes_on)

    def _header(
        self, role: str, learner: int | None, process: int, machine: Machine, **begun_from: Any
    ) -> Header:
        return Header(
            role=role,
            learner=learner,
            process=process,
            driver=self._experiment.driver,
            config=fingerprint(self._experiment),
            layout=self._layout.fingerprint,
            machine=machine,
            now=self._clock(),
            wall=self._wall(),
            **begun_from,
        )


class FleetTapes:
    """The tapes of a virtual fleet, written as an observer is told what happens."""

    def __init__(
        self,
        tapes: Tapes,
        state: SyncerState,
        model: GlobalModel,
        equipment: Sequence[Equipment],
        resumed_from: SnapshotName | None = None,
    ) -> None:
        """`state` is what the syncer's core begins from, `resumed_from` the snapshot that it is of."""
        self._tapes, self._model, self._equipment = tapes, model, equipment
        self._syncer = tapes.syncer(state, model, resumed_from)
        self._learners: dict[int, tuple[int, LearnerTape]] = {}  # by number, its newest process
        self._pulled: dict[int, dict[int, int]] = collections.defaultdict(dict)  # by learner: fragment, step

    @property
    def resumed_from(self) -> SnapshotName | None:
        """The snapshot without which the tapes cannot be replayed."""
        return self._syncer.header.resumed_from if self._syncer.on else None

    def came_back(self, learner: int, process: int, returned: Returned) -> None:
        """A process of a learner comes back from a snapshot, and has drawn no batch yet."""
        tape = self._tapes.learner(learner, process, self._equipment[learner], returned)
        self._learners[learner] = process, tape

    def state(self, learner: int | None) -> dict[str, Any]:
        """How far the tapes of a learner, or of the syncer (None), have come: JSON values, for `go_on`."""
        if not self._syncer.on:
            return {}
        if learner is None:
            self._syncer.flush()
        elif learner in self._learners:
            self._learners[learner][1].flush()
        name = "syncer-*" if learner is None else f"learner-{learner}-*"
        sizes = {path.name: path.stat().st_size for path in self._tapes.folder.glob(name)}
        return {
            "tapes": sizes,
            "pulled": sorted(self._pulled[learner].items()) if learner is not None else [],
        }

    def go_on(self, learner: int, told: Mapping[str, Any]) -> None:
        """Takes over what `state` told of a learner; its tape was cut back to there."""
        self._pulled[learner] = dict(told.get("pulled", ()))

    def syncer_handled(
        self, event: events.SyncerEvent, out: Sequence[actions.SyncerAction], now: float
    ) -> None:
        """The syncer's core took an event."""
        self._syncer.told(event, out, now)
        if isinstance(event, events.MergeFinished) and self._syncer.on:
            version, pieces = self._model.fragment(event.round.fragment)
            self._syncer.committed(event.round.fragment, version, pieces_sha256(pieces))

    def learner_handled(
        self,
        learner: int,
        process: int,
        event: events.LearnerEvent,
        out: Sequence[actions.LearnerAction],
        now: float,
        donated: InnerOrigin | None = None,
    ) -> None:
        """A learner's core took an event; `donated`: whose inner state it adopts, unless a fresh one."""
        tape = self._tape(learner, process)
        tape.told(event, now)
        for action in out:
            match action:
                case actions.AdoptAll():
                    tape.adopted(fresh=donated is None, origin=donated)
                    self._pulled[learner].clear()
                case actions.ApplyUpdate(fragment=fragment):
                    step = self._pulled[learner].pop(fragment, None)
                    if step is not None:
                        tape.pulled(fragment, step)

    def pulled(self, learner: int, contribution: Contribution) -> None:
        """The syncer has this snapshot of a learner."""
        if self._equipment[learner].transfer.error_feedback:
            self._pulled[learner][contribution.fragment] = contribution.step

    def end(self) -> None:
        """The run is over."""
        for _, tape in self._learners.values():
            tape.close()
        self._syncer.end([self._model.fragment(p)[0] for p in range(self._model.layout.num_fragments)])

    def _tape(self, learner: int, process: int) -> LearnerTape:
        known = self._learners.get(learner)
        if known is None or known[0] != process:
            if known is not None:
                known[1].close()
                self._pulled[learner].clear()
            known = process, self._tapes.learner(learner, process, self._equipment[learner])
            self._learners[learner] = known
        return known[1]


def fingerprint(experiment: Experiment) -> str:
    """SHA-256 (hex) of the settings that parameters and decisions follow from, as JSON."""
    settings = to_json(experiment)
    decisive = {name: _decisive(settings[name], _FREE.get(name, set())) for name in _DECISIVE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _decisive(settings: Any, free: set[str]) -> Any:
    if not free:
        return settings
    return {name: value for name, value in (settings or {}).items() if name not in free}


def machine_of(mesh: Mesh | None) -> Machine:
    """This machine, as far as numbers depend on it. `mesh` None: of the syncer, which computes on a CPU."""
    packages = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "unknown"
    if mesh is None:
        device = jax.local_devices(backend="cpu")[0]
        return Machine("cpu", (device.device_kind,), {}, 1, _xla_flags(), packages)
    devices = list(mesh.devices.flat)
    shape = {str(name): int(size) for name, size in mesh.shape.items()}
    kinds = tuple(d.device_kind for d in devices)
    return Machine(devices[0].platform, kinds, shape, len(jax.devices()), _xla_flags(), packages)


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(sorted({flag for flag in flags if "device_count" not in flag}))


def _position(batches: Batches) -> dict[str, Any] | None:
    return batches.get_state() if hasattr(batches, "get_state") else None
