"""The last events of a schedule, cheap to keep and easy to read."""

from __future__ import annotations

import collections
from typing import Any

from ddiloco.protocol import actions, events
from ddiloco.virtual.learner_process import VirtualLearner

KEPT = 60  # events


class Timeline:
    """Remembers the newest events with what followed."""

    def __init__(self, kept: int = KEPT) -> None:
        self._entries: collections.deque[tuple[float, Any, Any, list[Any]]] = collections.deque(maxlen=kept)

    def add(self, now: float, who: str | VirtualLearner, event: Any, out: list[Any]) -> None:
        """`who` took the event, and its core answered `out`."""
        self._entries.append((now, who, event, out))

    def lines(self) -> list[str]:
        """A line for each event, followed by an indented line for each of its actions."""
        lines: list[str] = []
        for now, who, event, out in self._entries:
            name = f"learner {who.number}" if isinstance(who, VirtualLearner) else who
            lines.append(f"{now:10.3f}  {name}: {_say(event)}")
            lines += [f"{'':14}-> {_say(action)}" for action in out]
        return lines


def _say(of: Any) -> str:
    match of:
        case actions.TellSyncer(event):
            return f"Tell {_say(event)}"
        case events.StepReported(report):
            counters = " ".join(f"v{c.version}+{c.steps}" for c in report.counters)
            return f"StepReported {report.learner}#{report.incarnation} step {report.step}: {counters}"
        case actions.Merge(round=which, version=version, contributions=given):
            who = ", ".join(f"{c.learner}#{c.incarnation} {c.steps} steps" for c in given)
            return f"Merge {which.step}/{which.fragment} into version {version}: {who}"
        case actions.Record(name=name, values=values):
            return f"Record {name} {dict(values)}"
    return str(of)
