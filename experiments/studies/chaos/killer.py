"""Carries out a plan of faults on real processes: signals, and partitions of their connections."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.studies.chaos.processes import PlannedFault

_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "resume": signal.SIGCONT}
_UNDONE_BY = {"hang": "resume", "partition": "heal"}


class Journal:
    """`faults.jsonl`: a line for each start and end of a process and for each fault; used by any thread.

    {"time": unix seconds, "event": "start", "end", "storm", "missed", a kind of fault, or "resume" or "heal"
    which undoes one, "target": who, ...}
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Begins a new file; raises OSError."""
        self._file = path.open("w")
        self._lock = threading.Lock()

    def write(self, event: str, target: str | None = None, **more: Any) -> None:
        """Adds a line, which outlives this process at once."""
        with self._lock:
            line = {"time": time.time(), "event": event, "target": target, **more}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()


class KillerAction(NamedTuple):
    """One thing to do, `time` seconds after the beginning of the plan."""

    time: float
    what: str  # "kill", "hang", "resume", "partition" or "heal"
    target: str
    fault: int  # number of the fault in the plan, to which it belongs


def agenda(plan: Sequence[PlannedFault]) -> list[KillerAction]:
    """All that a plan has done and undone, in the order of time."""
    deeds = []
    for i, fault in enumerate(plan):
        deeds.append(KillerAction(fault.time, fault.kind, fault.target, i))
        if fault.kind in _UNDONE_BY:
            deeds.append(KillerAction(fault.time + fault.duration, _UNDONE_BY[fault.kind], fault.target, i))
    return sorted(deeds)


class Killer:
    """Applies a plan's faults to the processes that have the targets' names at that time.

    A target that is dead, or not yet there, is missed. A hung process continues after the fault's time,
    unless it was killed; partitions of a target that overlap end with the last.
    """

    def __init__(
        self,
        process_of: Callable[[str], int | None],
        cut: Callable[[str, bool], None],
        journal: Journal,
        send: Callable[[int, int], None] = os.kill,
    ) -> None:
        """`process_of` gives a target's process; `cut` cuts its link (True) or heals it; `send` signals."""
        self._process_of, self._cut, self._journal, self._send = process_of, cut, journal, send
        self._hung: dict[int, tuple[str, int]] = {}  # fault: target and process
        self._parted: dict[int, str] = {}

    def run(self, plan: Sequence[PlannedFault], stop: threading.Event) -> None:
        """Carries the plan out from now on, until it is done or `stop` is set; undoes all in the end."""
        begun = time.monotonic()
        try:
            for deed in agenda(plan):
                if stop.wait(max(0.0, begun + deed.time - time.monotonic())):
                    break
                self.do(deed)
        finally:
            self.undo_all()

    def do(self, deed: KillerAction) -> None:
        """Does one thing now."""
        match deed.what:
            case "kill" | "hang":
                self._strike(deed)
            case "resume":
                self._resume(deed.fault)
            case "partition":
                self._parted[deed.fault] = deed.target
                self._journal.write("partition", deed.target)
                self._cut(deed.target, True)
            case "heal":
                self._heal(deed.fault)

    def undo_all(self) -> None:
        """Continues every hung process, and heals every partition."""
        for fault in list(self._hung):
            self._resume(fault)
        for fault in list(self._parted):
            self._heal(fault)

    def _strike(self, deed: KillerAction) -> None:
        pid = self._process_of(deed.target)
        if pid is None or not self._signal(pid, deed.what):
            self._journal.write("missed", deed.target, fault=deed.what)
            return
        self._journal.write(deed.what, deed.target, pid=pid)
        if deed.what == "hang":
            self._hung[deed.fault] = deed.target, pid

    def _resume(self, fault: int) -> None:
        target, pid = self._hung.pop(fault, (None, None))
        if target is not None and self._process_of(target) == pid and self._signal(pid, "resume"):
            self._journal.write("resume", target, pid=pid)

    def _heal(self, fault: int) -> None:
        target = self._parted.pop(fault, None)
        if target is not None and target not in self._parted.values():
            self._cut(target, False)
            self._journal.write("heal", target)

    def _signal(self, pid: int, what: str) -> bool:
        try:
            self._send(pid, _SIGNALS[what])
        except ProcessLookupError:
            return False
        return True
