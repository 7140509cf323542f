"""Snapshots of a virtual run: taken of the fleet, written while it runs on, and put back exactly."""

from __future__ import annotations

import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ddiloco.config import ConfigError
from ddiloco.disk.snapshots.books import Books
from ddiloco.disk.snapshots.cut import clocks_to_json
from ddiloco.disk.snapshots.parts import SYNCER_PART, learner_part
from ddiloco.disk.snapshots.store import (
    FOLDER,
    Part,
    PartFiles,
    PartWriter,
    Snapshot,
    SnapshotError,
    SnapshotStore,
)
from ddiloco.disk.tape.header import SnapshotName
from ddiloco.observe import records
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.roles.taping import FleetTapes
from ddiloco.roles.transfer import Offer
from ddiloco.settings.experiment import Experiment, to_json
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ghosts import Relay
from ddiloco.virtual.graph import GraphError
from ddiloco.virtual.recording import Document, Recorder, Recording
from ddiloco.virtual.resumption import put_back

PAYLOADS = (Offer,)
_PAYLOAD = "payload/"
# What changes nothing that happens.
_FREE = {"snapshot", "resume", "log", "tape", "eval", "sample", "remote", "sdc_check_every"}
_FREE_IN = {"data": {"data_dir", "prefetch"}, "train": {"steps_in_flight", "min_step_seconds"}}

Futures = dict[str, "concurrent.futures.Future[PartFiles]"]


class Counting(Protocol):
    """An observer that counts the tokens of all learners."""

    tokens: int


class VirtualSnapshots:
    """Has snapshots of a fleet taken as often as the settings say; the run waits for none but the last."""

    def __init__(
        self,
        workdir: pathlib.Path,
        experiment: Experiment,
        layout: str | None,
        fleet: Fleet,
        relay: Relay,
        record: Callable[[Any], None],
        observer_state: Callable[[int | None], dict[str, Any]],
        since: Snapshot | None = None,
        keep_also: SnapshotName | None = None,
    ) -> None:
        """Begins to watch the fleet.

        Args:
          workdir: of the run.
          experiment: its settings.
          layout: fingerprint of the fragments; None: there are no arrays.
          fleet: as it begins, or as it was put back.
          relay: its observer.
          record: hears what becomes of snapshots.
          observer_state: JSON values of those who observe a learner, or the syncer (None): of the latter
            `records` and `summary`, for the header, of both `tapes` if there are any, and more.
          since: the snapshot that the run goes on from.
          keep_also: the one that stays beside the newest ones.
        """
        config = experiment.snapshot
        self._every = config.every
        self._store = SnapshotStore(workdir / FOLDER, config.keep, keep_also)
        self._writer = PartWriter(workdir / FOLDER)
        self._header = {"experiment": to_json(experiment), "layout": layout}
        self._fleet, self._record = fleet, record
        self._number = 0 if since is None else since.number
        self._next_step = self._after(fleet.syncer.durable.step)
        self._writing: tuple[Recording, Futures, float] | None = None
        self._recorder = Recorder(
            fleet,
            relay,
            config.timeout,
            self._wanted,
            self._keep,
            self._give_up,
            observer_state=observer_state,
            payloads=PAYLOADS,
            epoch=self._number,
        )

    def close(self) -> None:
        """The run is over: waits for what is being written."""
        self._recorder.end()
        self._settle()
        self._writer.close(timeout=0.0)

    def _wanted(self) -> int | None:
        step = self._fleet.syncer.durable.step
        if step < self._next_step:
            return None
        self._next_step = self._after(step)
        self._number = max(self._number + 1, self._store.next_number())
        return self._number

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def _keep(self, recording: Recording) -> None:
        self._settle()
        parts = {learner_part(m): _learner(document) for m, document in recording.learners.items()}
        parts[SYNCER_PART] = _part(recording.syncer, {"in_flight": recording.in_flight})
        writing = {name: self._writer.write(recording.number, name, part) for name, part in parts.items()}
        self._writing = recording, writing, time.monotonic()

    def _settle(self) -> None:
        """Makes the snapshot that is being written complete."""
        if self._writing is None:
            return
        (recording, writing, begun), self._writing = self._writing, None
        try:
            files = {name: future.result() for name, future in writing.items()}
            header = {**self._header, **_header(recording)}
            self._store.complete(recording.number, header, files)
        except SnapshotError as error:
            self._store.discard(recording.number)
            self._give_up(recording.number, str(error))
            told = f"{error}: a snapshot is given up; training goes on"
            self._record(records.Alarm(told, self._fleet.calendar.now))
            return
        values = {
            "number": recording.number,
            "step": recording.step,
            "learners": header["learners"],
            "absent": header["absent"],
            "in_flight": len(recording.in_flight),
            "bytes": sum(size for part in files.values() for size, _ in part.files.values()),
            "seconds": time.monotonic() - begun,
        }
        self._record(records.Noted("snapshot", values, self._fleet.calendar.now))

    def _give_up(self, number: int, reason: str) -> None:
        values = {"number": number, "step": self._fleet.syncer.durable.step, "reason": reason}
        self._record(records.Noted("snapshot_given_up", values, self._fleet.calendar.now))


def goes_on_exactly(snapshot: Snapshot, experiment: Experiment) -> bool:
    """Whether a run of these settings goes on from the snapshot as if it had never ended."""
    then, now = snapshot.header["experiment"], to_json(experiment)
    return then["driver"] == now["driver"] == "virtual" and _decisive(then) == _decisive(now)


def check_goes_on_exactly(snapshot: Snapshot, experiment: Experiment) -> None:
    """Raises ConfigError, in a line that names the field, where `goes_on_exactly` says no."""
    if goes_on_exactly(snapshot, experiment):
        return
    then, now = _decisive(snapshot.header["experiment"]), _decisive(to_json(experiment))
    field, was, is_now = next(_differences(then, now), ("driver", then["driver"], now["driver"]))
    raise ConfigError(
        f"config.{field}: was {was!r}, is {is_now!r}: a run without arrays goes on only with its own settings"
    )


def make_snapshots(
    workdir: pathlib.Path | None,
    experiment: Experiment,
    layout: FragmentLayout | None,
    fleet: Fleet,
    relay: Relay,
    books: Books,
    observer: Counting,
    since: Snapshot | None,
    tapes: FleetTapes | None = None,
) -> VirtualSnapshots | None:
    """What takes the snapshots of a run; None where its settings ask for none, or it has no folder.

    `layout` and `tapes` are None where there are no arrays.
    """
    if workdir is None or not experiment.snapshot.every:
        return None

    def observed(learner: int | None) -> dict[str, Any]:
        told = {} if tapes is None else tapes.state(learner)
        if learner is not None:
            return told
        return {"tokens": observer.tokens, "records": books.lines(), "summary": books.summary(), **told}

    fingerprint = None if layout is None else layout.fingerprint
    keep_also = None if tapes is None else tapes.resumed_from
    return VirtualSnapshots(workdir, experiment, fingerprint, fleet, relay, books, observed, since, keep_also)


def put_back_observers(snapshot: Snapshot, books: Books, observer: Counting) -> None:
    """Puts those who observe a virtual run where they were; raises SnapshotError as `Snapshot.part` does."""
    observed = snapshot.part(SYNCER_PART).state["exact"]["values"]["observer"]
    books.resume(observed["records"], observed["summary"])
    observer.tokens = observed["tokens"]


def put_back_exactly(fleet: Fleet, relay: Relay, snapshot: Snapshot, tapes: FleetTapes | None = None) -> None:
    """Puts a fleet of the same settings, which has not begun, where it was; and those who tape it.

    Raises:
      ConfigError: the snapshot is of another version of the program.
      SnapshotError: it has been damaged since it was opened.
    """
    try:
        syncer = _document(snapshot.part(SYNCER_PART))
        learners = {m: _document(snapshot.part(learner_part(m))) for m in fleet.places}
        put_back(fleet, relay, syncer, learners, payloads=PAYLOADS)
        if tapes is not None:
            for m, document in learners.items():
                tapes.go_on(m, document.values["observer"])
    except (GraphError, KeyError, ValueError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"config.resume: {snapshot.folder} cannot be gone on from: {told}") from error


def _header(recording: Recording) -> dict[str, Any]:
    learners = recording.learners
    clocks = {m: document.clock for m, document in learners.items() if document.clock is not None}
    observed = recording.syncer.values["observer"]
    everybody = (recording.syncer, *learners.values())
    return {
        "step": recording.step,
        "versions": list(recording.syncer.told["versions"]),
        "time": recording.time,
        "learners": [m for m, document in learners.items() if document.told],
        "absent": [m for m, document in learners.items() if not document.told],
        "clocks": clocks_to_json(recording.syncer.clock, clocks),
        "in_flight": [f"{what} from {who} to {whom}" for who, whom, what, _ in recording.in_flight],
        "records": observed["records"],
        "summary": observed["summary"],
        "tapes": {
            k: size for who in everybody for k, size in who.values["observer"].get("tapes", {}).items()
        },
    }


def _learner(document: Document) -> Part:
    values = {} if document.held is None else document.held[1]
    tokens = values.get("position", {}).get("tokens", 0)
    return _part(document, {**values, "tokens": tokens})


def _part(document: Document, more: Mapping[str, Any]) -> Part:
    arrays, values = document.held or ({}, None)
    payloads = {f"{_PAYLOAD}{k}": array for k, array in enumerate(document.payloads)}
    exact = {"values": document.values, "held": values}
    return Part({**arrays, **payloads}, {**document.told, **more, "exact": exact})


def _document(part: Part) -> Document:
    payloads = {
        int(name.removeprefix(_PAYLOAD)): array
        for name, array in part.arrays.items()
        if name.startswith(_PAYLOAD)
    }
    own = {name: array for name, array in part.arrays.items() if not name.startswith(_PAYLOAD)}
    exact = part.state["exact"]
    return Document(exact["values"], payloads, None if exact["held"] is None else (own, exact["held"]))


def _differences(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        if then != now:
            yield path, then, now
        return
    for name in sorted({*then, *now}):
        yield from _differences(then.get(name), now.get(name), f"{path}.{name}" if path else name)


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if name not in _FREE}
    for name, free in _FREE_IN.items():
        kept[name] = {key: value for key, value in kept[name].items() if key not in free}
    return kept
