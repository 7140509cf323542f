"""The first record of a tape: whose it is, what it began from, and the machine that it was recorded on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ddiloco.config import build
from ddiloco.protocol.learner import FragmentWork
from ddiloco.protocol.state import SyncerState


@dataclasses.dataclass(frozen=True)
class Machine:
    """What numerical results depend on besides the settings."""

    platform: str  # "cpu", "gpu" or "tpu"
    devices: tuple[str, ...]  # the kind of each device of the mesh
    mesh: Mapping[str, int]  # devices along each axis
    visible: int  # devices that the process sees
    xla_flags: str  # from $XLA_FLAGS, without the number of devices
    packages: Mapping[str, str]  # versions by name


@dataclasses.dataclass(frozen=True)
class SnapshotName:
    """How a snapshot is named by the tapes of a run that resumes from it."""

    number: int
    sha256: str  # of its manifest, which has the checksums of all files; hex

    def __str__(self) -> str:
        return f"snapshot {self.number}"


@dataclasses.dataclass(frozen=True)
class ResumedWith:
    """What a learner has when it resumes from a snapshot, as `LearnerCore.resume` takes it."""

    snapshot: SnapshotName
    clock: int
    fragments: tuple[FragmentWork, ...]


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of one process's tape.

    Attributes:
      role: "learner" or "syncer".
      learner: its number; None for the syncer.
      process: a learner's first incarnation; for the syncer, the number of its process in the run, from 1.
      driver: the run's.
      config: fingerprint of the settings that numbers and decisions depend on, hex.
      layout: fingerprint of the fragments, hex.
      machine: what else the numbers depend on.
      now: seconds on the clock of the entries.
      wall: unix seconds at `now`; in virtual time the same as `now`.
      position: learner only: where its batches begin, as `Batches.get_state` gives it; None: at the start.
      state: syncer only: what it began from.
      sha256: syncer only: of each fragment that it began from, hex.
      resumed_from: syncer only: the snapshot from which the run resumed, if it did.
      resumed: learner only: what it resumed with, if it did.
      run: its random id, hex; empty in virtual time, where everything follows from the seed.
      lineage: syncer only: of the versions that it makes.
    """

    role: str
    learner: int | None
    process: int
    driver: str
    config: str
    layout: str
    machine: Machine
    now: float
    wall: float
    position: Mapping[str, Any] | None = None
    state: SyncerState | None = None
    sha256: tuple[str, ...] = ()
    resumed_from: SnapshotName | None = None
    resumed: ResumedWith | None = None
    run: str = ""
    lineage: int = 0

    @property
    def actor(self) -> str:
        """Whose tape it is: "learner 2", "the syncer"."""
        return "the syncer" if self.learner is None else f"learner {self.learner}"


def to_json(header: Header) -> str:
    """The header as a line of JSON."""
    return json.dumps(dataclasses.asdict(header), separators=(",", ":"))


def from_json(text: str) -> Header:
    """The header from what `to_json` gave. Raises ValueError if it is something else."""
    return build(Header, json.loads(text), "header")
