"""What a virtual fleet asks of arrays, and counting substitutes for a fleet without any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ddiloco.goodput.accounting import State
from ddiloco.outer.encoding import Traffic
from ddiloco.outer.global_model import NextVersion
from ddiloco.outer.guards import Notice
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.work import LearnerWork

Payload = Any  # arrays of a fragment; None where there are no arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A learner's whole state at a step boundary."""

    work: LearnerWork
    state: tuple[Any, Any]  # of its arrays


class LearnerArrays(Protocol):
    """The arrays of one learner's process."""

    def adopt(self, fragments: Sequence[Payload]) -> None:
        """Loads every fragment that came with a welcome."""

    def step(self, clock: int) -> tuple[int, Mapping[str, Any]]:
        """Takes an inner step; returns its tokens and metrics. `clock`: steps before this one."""

    def offer(self, fragment: int, steps: int) -> Payload:
        """Copies a fragment as the last step left it; `steps` names the offer until an update is applied."""

    def offered(self, fragment: int, steps: int) -> Payload:
        """The offer that was made then."""

    def position(self) -> Any:
        """Where its data stand after the last step; JSON values, nothing at the start."""

    def draw_from(self, position: Any) -> None:
        """Draws its data from there on; nothing: from their start."""

    def apply(
        self, fragment: int, mixing: float, payload: Payload, merged: int | None = None, rebase: bool = False
    ) -> None:
        """As an ApplyUpdate says."""

    def state(self) -> tuple[Any, Any]:
        """All that the next steps depend on, for `restore`: arrays, and JSON values."""

    def restore(self, arrays: Any, values: Any) -> None:
        """Loads what `state` gave."""

    def lose(self) -> None:
        """The process has died, and its memory is lost."""


class SyncerArrays(Protocol):
    """The arrays of the syncer: the global fragments, which are durable once merged."""

    traffic: Traffic  # bytes on the wire

    def fragment(self, fragment: int) -> Payload:
        """A global fragment."""

    def received(self, fragment: int, payload: Payload) -> Payload:
        """A learner's fragment, to be merged; raises InvalidContribution if it is unsound."""

    def merge(self, fragment: int, given: Sequence[tuple[Contribution, Payload]]) -> NextVersion:
        """Merges and commits."""


class Observer:
    """Hears what happens in a fleet; does nothing unless a method is overridden. Times are virtual."""

    def syncer_handled(self, event: events.SyncerEvent, out: list[Any], now: float, shard: int = 0) -> None:
        """The core of a shard of the syncer took an event and answered with these actions."""

    def learner_handled(self, learner: Any, event: events.LearnerEvent, out: list[Any], now: float) -> None:
        """The core of a `VirtualLearner` took an event and answered with these actions."""

    def stepped(self, learner: int, clock: int, tokens: int, metrics: Mapping[str, Any], now: float) -> None:
        """A learner has finished an inner step; one that was skipped has no tokens."""

    def entered(self, learner: int, state: State, chips: int, now: float) -> None:
        """A learner is in another state, or has another number of chips at work."""

    def noted(self, name: str, values: Mapping[str, Any], now: float) -> None:
        """A record of the protocol."""

    def dropped(self, drop: actions.Drop, now: float) -> None:
        """A core did not use something."""

    def transferred(self, learner: int, sent: int, received: int) -> None:
        """Bytes of fragments went over a learner's link, from its point of view."""

    def merged(self, merge: actions.Merge, left_out: Sequence[int], now: float) -> None:
        """A merge is committed, without the offers of some learners."""

    def checkpointed(self, learner: Any, checkpoint: Checkpoint, now: float) -> None:
        """A `VirtualLearner` has made a checkpoint of its state."""

    def resumed(self, learner: Any, checkpoint: Checkpoint, out: list[Any], now: float) -> None:
        """The core of a `VirtualLearner` has taken up what a checkpoint holds."""

    def guarded(self, round_id: RoundId, notices: Sequence[Notice], now: float) -> None:
        """What was done about learners whose offers for a round are not merged."""


class CountingLearner(LearnerArrays):
    """A learner without arrays."""

    def __init__(self, tokens: Callable[[], int], skips: Callable[[], bool] = lambda: False) -> None:
        """`tokens`: of the next step; `skips`: whether it will be skipped."""
        self._tokens, self._skips = tokens, skips
        self.drawn = 0  # batches, from the start of its data

    def position(self) -> int:
        """How many batches it has drawn."""
        return self.drawn

    def draw_from(self, position: int) -> None:
        """Goes on behind so many batches."""
        self.drawn = position or 0

    def state(self) -> tuple[None, int]:
        """How many batches it has drawn."""
        return None, self.drawn

    def restore(self, arrays: None, values: int) -> None:
        """Goes on behind so many batches."""
        self.drawn = values

    def step(self, clock: int) -> tuple[int, Mapping[str, Any]]:
        """The tokens, and in the metrics only whether the step is skipped."""
        self.drawn += 1
        return self._tokens(), {"skipped": 1} if self._skips() else {}


class CountingSyncer(SyncerArrays):
    """A syncer without arrays, to which every fragment is sound."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def merge(self, fragment: int, given: Sequence[tuple[Contribution, Payload]]) -> NextVersion:
        """Merges nothing, and has no metrics."""
        return NextVersion((), {})
