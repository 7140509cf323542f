"""A fleet put back as a recording of it says: everybody at its own time, with what was in flight."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.virtual.calendar import Entry
from ddiloco.virtual.calls import read_entry
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ghosts import Ghost, Relay
from ddiloco.virtual.graph import GraphError, Reader
from ddiloco.virtual.recording import Document
from ddiloco.virtual.vocabulary import vocabulary


def put_back(
    fleet: Fleet,
    relay: Relay,
    syncer: Document,
    learners: Mapping[int, Document],
    *,
    payloads: Iterable[type] = (),
) -> None:
    """Puts a new fleet of the same settings into a recorded state; what its calendar holds gives way.

    The syncer goes on at its cut. A learner whose own cut is later does nothing until then: what it did in
    between is there as messages on their way and as what the observer hears.

    Args:
      fleet: made of the settings of the recorded one, and has not begun.
      relay: the fleet's observer.
      syncer: recorded, with arrays on the host.
      learners: the same, by number, every one of them.
      payloads: classes of what travels beside messages.

    Raises:
      GraphError: the recording is not of such a fleet.
    """
    if learners.keys() != fleet.places.keys():
        raise GraphError(f"learners {sorted(learners)} were recorded, but there are {sorted(fleet.places)}")
    known = vocabulary(payloads)
    values = syncer.values
    try:
        reader = Reader(known, {"policy": fleet.policy}, syncer.payloads)
        reader.fill(fleet.syncer, values["syncer"])
        for m, told in values["links"]:
            reader.fill(fleet.places[m].down, told)
        entries = [read_entry(reader, told, fleet, {}, _no_ghost) for told in values["entries"]]
        for m, document in learners.items():
            entries += _put_back_learner(fleet, relay, m, document, known)
        fleet.calendar.put_back(*values["calendar"], entries)
        if syncer.held is not None:
            fleet.syncer.arrays.restore(*syncer.held)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise GraphError(f"the recording is of another form: {type(error).__name__}: {error}") from error


def _put_back_learner(
    fleet: Fleet, relay: Relay, learner: int, document: Document, known: Any
) -> list[Entry]:
    values, place = document.values, fleet.places[learner]
    reader = Reader(known, {"policy": fleet.policy}, document.payloads)
    told = dict(values["processes"])
    processes = fleet.put_back(learner, told, dict(values["routes"]), values["newest"])
    for number, process in processes.items():
        reader.name(f"process {number}", process)
    reader.fill(place, values["place"])
    for number, process in processes.items():
        reader.fill(process, told[number])
    if values["newest"] is not None and document.held is not None:
        processes[values["newest"]].arrays.restore(*document.held)
    ghost = functools.partial(_ghost, fleet, relay, learner)
    read = functools.partial(read_entry, reader, fleet=fleet, processes=processes, ghost=ghost)
    entries = [read(entry) for entry in (*values["entries"], *values["channel"])]
    for time, order, observed, entered, cut in values["ghosts"]:
        entries.append(Entry(time, order, ghost(reader.read(observed), entered, cut), ()))
    return entries


def _ghost(fleet: Fleet, relay: Relay, learner: int, told: Any, entered: int, cut: bool) -> Ghost:
    return Ghost(learner, told, entered, cut, relay, fleet.calendar, fleet.places[learner].down)


def _no_ghost(told: Any, entered: int, cut: bool) -> Ghost:
    raise GraphError("the syncer has no ghosts")
