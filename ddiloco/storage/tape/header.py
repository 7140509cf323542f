"""The first record of a tape: its process, its initial state, and the machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ddiloco.config import build
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.work import LearnerWork
from ddiloco.storage.tape.entries import InnerOrigin


@dataclasses.dataclass(frozen=True)
class Machine:
    """Properties of the machine that affect numerical results."""

    platform: str  # "cpu", "gpu" or "tpu"
    devices: tuple[str, ...]  # the kind of each device of the mesh
    mesh: Mapping[str, int]  # devices along each axis
    visible: int  # devices that the process sees
    xla_flags: str  # from $XLA_FLAGS, without flags that a replay in one process must change
    packages: Mapping[str, str]  # versions by name
    threads: int = 0  # with which XLA computes on CPU devices: by them it splits sums; 0 on others


@dataclasses.dataclass(frozen=True)
class ResumedWith:
    """The state with which a learner resumes, as in `LearnerCore.resume`.

    The state is that which another tape of the learner names, or is kept with the tapes.
    """

    work: LearnerWork
    began: Watermark = NOTHING_MERGED
    origin: InnerOrigin | None = None


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of one process's tape."""

    role: str  # "learner" or "syncer"
    learner: int | None  # its number; None for the syncer
    # A learner's first incarnation; for the syncer, the number of its process in the run, from 1. It is above
    # those of all earlier processes that had any of its fragments.
    process: int
    driver: str  # the run's
    config: str  # fingerprint of the settings that numbers and decisions depend on, hex
    layout: str  # fingerprint of the fragments, hex
    machine: Machine  # for further effects on numbers
    now: float  # seconds on the clock of the entries
    wall: float  # unix seconds at `now`; in virtual time the same as `now`
    # Learner only: where its batches begin, as `Batches.get_state` gives it; None: at the start
    position: Mapping[str, Any] | None = None
    state: SyncerState | None = None  # syncer only: its initial state
    sha256: tuple[str, ...] = ()  # syncer only: of each of its initial fragments, hex
    resumed: ResumedWith | None = None  # learner only: the resumed state, if any
    share: int = 1  # learner only: one in so many of its hosts was there
    run: str = ""  # its random id, hex; empty in virtual time, where the seed determines all
    lineage: int = 0  # syncer only: of the versions that it makes
    shard: int = 0  # of the syncer: which of its processes
    shards: int = 1  # S
    # Syncer only: the head of the chain of the shard's tape before, hex; empty: there is none, or none signs
    previous: str = ""

    @property
    def actor(self) -> str:
        """The process of the tape: "learner 2", "the syncer", "shard 1 of the syncer"."""
        if self.learner is not None:
            return f"learner {self.learner}"
        return f"shard {self.shard} of the syncer" if self.shards > 1 else "the syncer"

    @property
    def fragments(self) -> tuple[int, ...]:
        """The fragments that the process merges."""
        return () if self.state is None else fragments_of(self.shard, self.shards, len(self.state.versions))


def to_json(header: Header) -> str:
    """The header as a line of JSON."""
    return json.dumps(dataclasses.asdict(header), separators=(",", ":"))


def from_json(text: str) -> Header:
    """The header from what `to_json` gave. Raises ValueError if it is something else."""
    return build(Header, json.loads(text), "header")
