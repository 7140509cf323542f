"""What stands first on a tape: whose it is, what it began from, and what the same numbers can be had on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol.learner import FragmentWork
from ddiloco.protocol.state import SyncerState


@dataclasses.dataclass(frozen=True)
class Machine:
    """What numbers depend on beside the settings."""

    platform: str  # "cpu", "gpu" or "tpu"
    devices: tuple[str, ...]  # kinds of the mesh's devices, one each
    mesh: Mapping[str, int]  # devices along each axis
    visible: int  # devices that the process sees
    xla_flags: str  # of $XLA_FLAGS, but for the number of devices
    packages: Mapping[str, str]  # versions by name

    def differences(self, other: Machine) -> list[str]:
        """What differs, as short phrases: "jax 0.9.0, here 0.10.2"."""
        ours, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        found = [
            f"{name} {_shown(ours[name])}, here {_shown(theirs[name])}"
            for name in ("platform", "devices", "mesh", "visible", "xla_flags")
            if ours[name] != theirs[name]
        ]
        names = sorted({*self.packages, *other.packages})
        found += [
            f"{name} {self.packages.get(name, 'unknown')}, here {other.packages.get(name, 'none')}"
            for name in names
            if self.packages.get(name) != other.packages.get(name)
        ]
        return found


@dataclasses.dataclass(frozen=True)
class SnapshotName:
    """A snapshot, as those call it who resume from it."""

    number: int
    sha256: str  # of its manifest, which vouches for every byte; hex

    def __str__(self) -> str:
        return f"snapshot {self.number}"


@dataclasses.dataclass(frozen=True)
class ResumedWith:
    """With what a learner resumes from a snapshot, as `LearnerCore.resume` takes it."""

    snapshot: SnapshotName
    clock: int
    fragments: tuple[FragmentWork, ...]


@dataclasses.dataclass(frozen=True)
class Header:
    """Of one process of one actor.

    Attributes:
      role: "learner" or "syncer".
      learner: its number; None for the syncer.
      process: a learner's first incarnation; the number of the syncer's process in the run, from 1.
      driver: that of the run.
      config: fingerprint of the settings that numbers and decisions follow from, hex.
      layout: fingerprint of the fragments, hex.
      machine: what the numbers depend on beside.
      now: seconds, of the clock that entries are timed by.
      wall: unix seconds at `now`; in virtual time the same as `now`.
      position: of a learner, where its first batch comes from, as its batches tell it; None: their beginning.
      state: of the syncer, what it began from.
      sha256: of the syncer, of each fragment that it began from, hex.
      resumed_from: of the syncer, the snapshot that the run resumes from, if it does.
      resumed: of a learner that resumes from a snapshot, with what.
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

    def differences(self, other: Header) -> list[str]:
        """What of that which numbers follow from is another, as short phrases."""
        names = [name for name in ("config", "layout") if getattr(self, name) != getattr(other, name)]
        told = {"config": "other settings", "layout": "other fragments"}
        return [*(told[name] for name in names), *self.machine.differences(other.machine)]

    @property
    def actor(self) -> str:
        """The name of whose tape it is: "learner 2", "the syncer"."""
        return "the syncer" if self.learner is None else f"learner {self.learner}"


def to_json(header: Header) -> str:
    """The header in a line of JSON."""
    return json.dumps(dataclasses.asdict(header), separators=(",", ":"))


def from_json(text: str) -> Header:
    """The header of what `to_json` gave. Raises ValueError: the text is none."""
    try:
        values = json.loads(text)
        machine = values.pop("machine")
        state = values.pop("state")
        machine["devices"] = tuple(machine["devices"])
        if state is not None:
            state = SyncerState(
                tuple(state["versions"]),
                tuple(state["merged_steps"]),
                tuple((m, number) for m, number in state["incarnations"]),
            )
        sha256, name, resumed = (values.pop(key) for key in ("sha256", "resumed_from", "resumed"))
        if resumed is not None:
            fragments = tuple(FragmentWork(**told) for told in resumed["fragments"])
            resumed = ResumedWith(SnapshotName(**resumed["snapshot"]), resumed["clock"], fragments)
        return Header(
            machine=Machine(**machine),
            state=state,
            sha256=tuple(sha256),
            resumed_from=None if name is None else SnapshotName(**name),
            resumed=resumed,
            **values,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a header that cannot be read: {error}") from None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {size}" for name, size in value.items() if size > 1) or "of one device"
    if isinstance(value, tuple):
        return f"{len(value)} x {value[0]}" if len(set(value)) == 1 else ", ".join(value)
    return str(value) or "none"
