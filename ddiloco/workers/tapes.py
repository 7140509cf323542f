"""The tapes of a run's actors, with headers that name all that their numbers depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import GlobalModel, pieces_sha256
from ddiloco.protocol.state import SyncerState
from ddiloco.settings.experiment import Experiment, all_settings
from ddiloco.storage.kept_offers import KeptOffers
from ddiloco.storage.tape.header import Header, Machine, ResumedWith
from ddiloco.storage.tape.recorder import (
    FOLDER,
    LearnerTape,
    Notary,
    SyncerTape,
    last_head,
    learner_tape,
    next_syncer,
    syncer_tape,
)
from ddiloco.telemetry import records
from ddiloco.training.platform import compute_threads
from ddiloco.workers.learner_arrays import Equipment

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "grain", "ddiloco")


MAX_BYTES = 4 << 30  # of one process's tape, which then ends


class Tapes:
    """Makes a run's tapes, unless its settings ask for none or it has no folder."""

    def __init__(
        self,
        workdir: pathlib.Path | None,
        experiment: Experiment,
        layout: FragmentLayout,
        record: Callable[[records.Record], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        run: str = "",
    ) -> None:
        """`clock`: the cores' time, in seconds. `wall`: unix seconds. `record` gets alarms. `run`: its id."""
        self.folder = workdir / FOLDER if workdir is not None and experiment.tape.enabled else None
        self._experiment, self._layout, self._record = experiment, layout, record
        self._clock, self._wall, self._run = clock, wall, run

    def learner(
        self, learner: int, process: int, equipment: Equipment, resumed: ResumedWith | None = None
    ) -> LearnerTape:
        """The tape of a learner's process; call it before the first batch is read.

        Args:
          learner: its number.
          process: its first incarnation.
          equipment: the learner's.
          resumed: the resumed state, if any.
        """
        if self.folder is None:
            return LearnerTape(learner, process)
        machine = machine_of(equipment.program.mesh)
        position = equipment.batches.get_state()
        begun = {"position": position, "resumed": resumed, "share": equipment.share}
        header = self._header("learner", learner, process, machine, **begun)
        path = learner_tape(self.folder, learner, process)
        return LearnerTape(learner, process, path, header, self._record, MAX_BYTES)

    def syncer(
        self,
        state: SyncerState,
        model: GlobalModel,
        lineage: int = 0,
        shard: int = 0,
    ) -> SyncerTape:
        """The tape of a syncer's process.

        Args:
          state: what its core begins from.
          model: holds the fragments that it begins from.
          lineage: of the versions that the process makes.
          shard: which of the syncer's processes it is.
        """
        if self.folder is None:
            return SyncerTape()
        sha256 = tuple(pieces_sha256(model.fragment(p)[1]).hex() for p in model.fragments)
        process = next_syncer(self.folder)
        notary = self._notary(shard)
        previous = "" if notary is None else last_head(self.folder, shard)
        begun = {"state": state, "sha256": sha256, "lineage": lineage, "previous": previous}
        header = self._header("syncer", None, process, machine_of(None), shard=shard, **begun)
        path = syncer_tape(self.folder, process, shard)
        return SyncerTape(path, header, self._record, MAX_BYTES, notary)

    def _notary(self, shard: int) -> Notary | None:
        """What a shard of the syncer signs with, where it does."""
        e = self._experiment
        if self.folder is None or e.driver != "remote" or not e.remote.receipts:
            return None
        from ddiloco.storage import signing_keys as keys

        folder = self.folder.parent / keys.FOLDER
        signer = keys.Signer(folder, keys.syncer_name(shard))
        share = e.remote.keep_offers
        kept = KeptOffers(self.folder.parent, share) if share else None
        return Notary(signer, keys.PublicKeys(folder), kept)

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
            run=self._run,
            shards=self._experiment.syncer_shards,
            **begun_from,
        )


def fingerprint(experiment: Experiment) -> str:
    """SHA-256 (hex) of the settings that parameters and decisions depend on, as JSON."""
    found = all_settings(experiment)
    decisive = {leaf.path: leaf.value for leaf in found if leaf.metadata["may_change"] != "process"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def machine_of(mesh: Mesh | None) -> Machine:
    """The properties of this machine that affect results. `mesh` None: for the syncer, on a CPU."""
    packages = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "unknown"
    if mesh is None:
        device = jax.local_devices(backend="cpu")[0]
        kinds = (device.device_kind,)
        return Machine("cpu", kinds, {}, 1, _xla_flags(), packages, compute_threads())
    devices = list(mesh.devices.flat)
    shape = {str(name): int(size) for name, size in mesh.shape.items()}
    kinds = tuple(d.device_kind for d in devices)
    on, visible = devices[0].platform, len(jax.devices())
    threads = compute_threads() if on == "cpu" else 0
    return Machine(on, kinds, shape, visible, _xla_flags(), packages, threads)


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    # A replay has other devices, and no other hosts with which to share the search for kernels.
    others = {flag for flag in flags if "device_count" not in flag and "shard_autotuning" not in flag}
    return " ".join(sorted(others))
