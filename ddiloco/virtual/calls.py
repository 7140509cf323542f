"""Entries of a fleet's calendar as JSON values: whose they are, and which of its calls they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.virtual.calendar import Entry
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.ghosts import Ghost
from ddiloco.virtual.graph import GraphError, Reader, Writer
from ddiloco.virtual.learner_process import VirtualLearner
from ddiloco.virtual.syncer_process import VirtualSyncer

SYNCER = -1  # in the place of a learner's number

_OF_FLEET = ("join", "fail", "recover", "leave", "cut", "_befall", "_join_if_expected", "_answer_pull")
_OF_PROCESS = ("take", "pause", "resume", "hang", "die", "_unhang", "_finish_step", "_beat")
_OF_SYNCER = ("take", "crash", "restart", "_merge", "_fire")


def owner(entry: Entry) -> int:
    """Whose state an entry changes: a learner's number, or SYNCER.

    Raises:
      GraphError: it is no call of a fleet, so nobody can say.
    """
    call = entry.call
    if isinstance(call, Ghost):
        return call.learner
    of, name = getattr(call, "__self__", None), getattr(call, "__name__", "")
    if isinstance(of, VirtualSyncer) and name in _OF_SYNCER:
        return SYNCER
    if isinstance(of, VirtualLearner) and name in _OF_PROCESS:
        return of.number
    if isinstance(of, Fleet) and name in _OF_FLEET:
        whose = entry.arguments[0]
        if name == "_befall":
            return whose.learner
        return whose.number if name == "_answer_pull" else whose
    raise GraphError(f"{name or call!r} in the calendar cannot be recorded")


def write_entry(writer: Writer, entry: Entry) -> list[Any]:
    """The entry as JSON values; raises GraphError as `owner` and `Writer.write` do."""
    call, when = entry.call, [entry.time, entry.order]
    if isinstance(call, Ghost):
        return [*when, "ghost", None, [writer.write(call.told), call.entered, call.cut]]
    whose = call.__self__
    process = whose.process if isinstance(whose, VirtualLearner) else None
    kind = "syncer" if owner(entry) == SYNCER else "fleet" if process is None else "process"
    return [*when, f"{kind}.{call.__name__}", process, [writer.write(a) for a in entry.arguments]]


def read_entry(
    reader: Reader,
    told: Sequence[Any],
    fleet: Fleet,
    processes: dict[int, VirtualLearner],
    ghost: Callable[..., Ghost],
) -> Entry:
    """The entry that `write_entry` told of.

    Args:
      reader: of its arguments.
      told: the JSON values.
      fleet: whose calls they are.
      processes: those of the learner, by their first incarnations.
      ghost: makes one of what was told, how many entries were made, and whether the link was cut.

    Raises:
      GraphError: it is no call of a fleet.
    """
    time, order, name, process, arguments = told
    if name == "ghost":
        observed, entered, cut = arguments
        return Entry(time, order, ghost(reader.read(observed), entered, cut), ())
    kind, _, method = name.partition(".")
    known = {"fleet": _OF_FLEET, "process": _OF_PROCESS, "syncer": _OF_SYNCER}
    if method not in known.get(kind, ()) or (kind == "process" and process not in processes):
        raise GraphError(f"{name} of {process} is no call of this fleet")
    whose: Any = {"fleet": fleet, "syncer": fleet.syncer, "process": processes.get(process)}[kind]
    return Entry(time, order, getattr(whose, method), tuple(reader.read(a) for a in arguments))
