"""What a run has recorded so far: lines of its files and figures of its summary, for a cut through them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.observe import records
from ddiloco.observe.scalars import as_float, as_json

_PENDING = 1000  # flags of skipped steps that may still be on the devices

Record = Callable[[Any], None]


class Books:
    """Passes on the records of a run that are in one order, and counts them; of a virtual run alone."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._steps: collections.Counter[int] = collections.Counter()
        self._drops: collections.Counter[str] = collections.Counter()
        self._noted: collections.Counter[str] = collections.Counter()
        self._evaluations: list[dict[str, Any]] = []
        self._states = self._sent = self._received = self._skipped = 0
        self._pending: list[Any] = []

    def __call__(self, record: records.Record) -> None:
        """Takes a record."""
        match record:
            case records.StepDone():
                self._steps[record.learner] += 1
                self._pending.append(record.metrics.get("skipped", 0))
                if len(self._pending) >= _PENDING:
                    self._settle()
            case records.StateChanged():
                self._states += 1
            case records.Transferred():
                self._sent += record.sent
                self._received += record.received
            case records.Noted():
                self._noted[record.name] += 1
                if record.name == "drop":
                    self._drops[str(record.values["reason"])] += 1
            case records.Evaluated():
                self._evaluations.append(_evaluation(record))
        self._record(record)

    def lines(self) -> dict[str, Any]:
        """By file of the workdir, the lines that have been recorded for it, over all resumptions."""
        steps = {str(m): count for m, count in sorted(self._steps.items())}
        return {"steps": steps, "rounds": self._noted["round"], "states": self._states}

    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json` that no file tells."""
        self._settle()
        return {
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "drops": dict(sorted(self._drops.items())),
            "inner_states": {},
            "eval_history": list(self._evaluations),
            "rounds_skipped": self._noted["round_skipped"],
            "rounds_abandoned": self._noted["round_abandoned"],
            "skipped_steps": self._skipped,
        }

    def resume(self, lines: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Goes on from what `lines` and `summary` told."""
        self._steps = collections.Counter({int(m): count for m, count in lines["steps"].items()})
        self._states = lines["states"]
        self._drops = collections.Counter(summary["drops"])
        self._noted = collections.Counter(
            round=lines["rounds"],
            round_skipped=summary["rounds_skipped"],
            round_abandoned=summary["rounds_abandoned"],
        )
        self._evaluations = list(summary["eval_history"])
        self._sent, self._received = summary["bytes_sent"], summary["bytes_received"]
        self._skipped, self._pending = summary["skipped_steps"], []

    def _settle(self) -> None:
        self._skipped += sum(bool(as_float(flag)) for flag in self._pending)
        self._pending = []


def _evaluation(record: records.Evaluated) -> dict[str, Any]:
    told = {"step": record.step, "tokens": record.tokens, "seconds": record.time, "loss": record.loss}
    return as_json({**told, **record.statistics})
