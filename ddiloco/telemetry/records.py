"""Records, from the threads of a run to its monitor.

`time` is in unix seconds in real runs and in virtual seconds in virtual ones. Values may be device
scalars that are complete; only the monitor's thread turns them into floats.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.goodput.accounting import State
from ddiloco.outer.guards import Notice
from ddiloco.protocol.messages import RoundId
from ddiloco.telemetry.scalars import was_skipped
from ddiloco.telemetry.terminal import printable


@dataclasses.dataclass(frozen=True, slots=True)
class StepDone:
    """A learner took an inner step; one that was skipped has no tokens."""

    learner: int
    step: int  # the learner's clock after the step
    time: float
    tokens: int  # that counted for the loss; 0 of a skipped step, whatever is given
    # "loss" (nats per token), "grad_norm", "learning_rate", "skipped" (0 or 1), the model's statistics, and
    # what `ddiloco.training.step_meter` measured
    metrics: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.skipped:
            object.__setattr__(self, "tokens", 0)

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing, as its loss or gradient was not finite."""
        return was_skipped(self.metrics)


@dataclasses.dataclass(frozen=True, slots=True)
class StateChanged:
    """A learner is in another state from `time` on."""

    learner: int
    state: State
    time: float
    chips: int | None = None  # of the learner's chips, those in the job from then on; None: all


@dataclasses.dataclass(frozen=True, slots=True)
class Noted:
    """A record of the protocol: "round", "round_skipped", "learner_lost", "drop" and so on."""

    name: str
    values: Mapping[str, Any]
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes over a learner's wire since its last such record, from the learner's point of view."""

    learner: int
    sent: int
    received: int


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """The global model's score on held-out data."""

    step: int  # the global step
    tokens: int  # that the global model has seen
    time: float
    loss: float  # nats per token
    # The model's own metrics by name, such as "accuracy" (in [0, 1]) of a classifier or captioner.
    statistics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerDied:
    """A learner's thread or process ended by an exception."""

    learner: int
    time: float
    traceback: str


@dataclasses.dataclass(frozen=True, slots=True)
class Alarm:
    """A problem that does not end the run, as a sentence; the same sentence is shown and kept once."""

    sentence: str
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """The syncer continues from durable fragments, of which these versions had been merged."""

    versions: tuple[int, ...]  # by fragment
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Flush:
    """Asks for all earlier records to be written to the run's files; `done` is called once they are."""

    done: Callable[[], None]
    summary: bool = False
    """Whether the summary counts them by then, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """The last one of a queue: its thread ends, the monitor's once everything is written."""


Record = (
    StepDone | StateChanged | Noted | Transferred | Evaluated | LearnerDied | Alarm | Resumed | Flush | Stop
)


# The protocol's records by which a learner is away, and there again.
LOST, READY = ("learner_lost", "learner_silent"), ("learner_ready", "learner_returned")

EVENTS = frozenset(
    {
        *LOST,
        *READY,
        "timing_set",
        "round_refused",
        "snapshot",
        "snapshot_given_up",
        "guard_quarantined",
        "guard_released",
    }
    | {"report_kept_back", "sdc", "host_here", "host_gone", "records_lost"}
)
"""The protocol's records that `events.jsonl` has a line for: rare ones."""


def event_line(record: Record) -> dict[str, Any] | None:
    """The line of `events.jsonl` for this record; None: it has none."""
    match record:
        case Alarm(sentence, time):
            return {"time": time, "event": "alarm", "alarm": sentence}
        case LearnerDied(learner, time, traceback):
            last = (traceback.strip() or "no traceback").splitlines()[-1]
            return {"time": time, "event": "died", "learner": learner, "reason": last}
        case Noted(name, values, time) if name in EVENTS:
            return {"time": time, "event": name, **values}
    return None


def write_out(record: Callable[[Record], None], seconds: float = 2.0, summary: bool = False) -> None:
    """Waits until all earlier records are in the run's files, `seconds` at most: disks may hang."""
    done = threading.Event()
    record(Flush(done.set, summary))
    done.wait(seconds)


def reason(error: BaseException) -> str:
    """A problem in one line, as in alarms; libraries' messages are longer and may quote a file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = next(iter(str(error).splitlines()), "")
    return printable(line, 300) or type(error).__name__


def corruption(learner: int, step: int, devices: Sequence[str], time: float) -> list[Record]:
    """The records of a step that gave another result on these devices when it was repeated."""
    sentence = (
        f"learner {learner}, step {step}: {', '.join(devices)} gave other bits as the step was computed "
        "again: silent data corruption; the step is dropped"
    )
    values = {"learner": learner, "step": step, "devices": ", ".join(devices)}
    return [Alarm(sentence, time), Noted("sdc", values, time)]


def guarded(notices: Sequence[Notice], round_id: RoundId, time: float) -> list[Record]:
    """The records of what was done about learners in a round."""
    found: list[Record] = []
    for notice in notices:
        values = {**dataclasses.asdict(round_id), "learner": notice.learner, "why": notice.why}
        found += [Alarm(notice.alarm, time), Noted(f"guard_{notice.kind}", values, time)]
    return found


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Facts about a run before it starts."""

    algorithm: str
    num_learners: int  # as many as it starts with
    num_params: int
    num_fragments: int
    total_steps: int
    seed: int
    chips_by_learner: Mapping[int, int]  # of all that it may have
