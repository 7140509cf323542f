"""The arrays of a virtual fleet as an interface, and counting substitutes for a fleet without any."""

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
from ddiloco.workers.learner_actor import LearnerArrays, Payload


@dataclasses.dataclass(frozen=True, eq=False)
class VirtualCheckpoint:
    """A learner's whole state at a step boundary."""

    work: LearnerWork
    state: tuple[Any, Any]  # of its arrays


class SyncerArrays(Protocol):
    """The arrays of the syncer: the global fragments, which are durable once merged."""

    traffic: Traffic  # bytes on the wire

    def fragment(self, fragment: int) -> Payload:
        """A global fragment."""

    def received(self, fragment: int, payload: Payload, learner: int) -> Payload:
        """A learner's fragment, to be merged; raises InvalidContribution if it is unsound."""

    def merge(
        self, fragment: int, given: Sequence[tuple[Contribution, Payload]], interval: int | None
    ) -> NextVersion:
        """Merges and commits; steps of a contribution beyond the interval add no weight."""


class Observer:
    """Is notified of a fleet's events; does nothing unless a method is overridden. Times are virtual."""

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

    def transferred(self, learner: int, sent: int, received: int) -> None:
        """Bytes of fragments went over a learner's link, from its point of view."""

    def merged(self, merge: actions.Merge, left_out: Sequence[int], now: float) -> None:
        """A merge is committed, without the offers of some learners."""

    def checkpointed(self, learner: Any, checkpoint: VirtualCheckpoint, now: float) -> None:
        """A `VirtualLearner` has made a checkpoint of its state."""

    def resumed(self, learner: Any, checkpoint: VirtualCheckpoint, out: list[Any], now: float) -> None:
        """The core of a `VirtualLearner` has resumed a checkpoint."""

    def guarded(self, round_id: RoundId, notices: Sequence[Notice], now: float) -> None:
        """The guard's actions on learners whose offers were left out."""


class CountingLearner(LearnerArrays):
    """A learner without arrays."""

    def __init__(self, tokens: Callable[[], int], skips: Callable[[], bool] = lambda: False) -> None:
        """`tokens`: of the next step; `skips`: whether it will be skipped."""
        self._tokens, self._skips = tokens, skips
        self.drawn = 0  # batches, from the start of its data

    def position(self) -> int:
        """Number of batches read."""
        return self.drawn

    def draw_from(self, position: int) -> None:
        """Goes on behind so many batches."""
        self.drawn = position or 0

    def state(self) -> tuple[None, int]:
        """Number of batches read."""
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

    def merge(
        self, fragment: int, given: Sequence[tuple[Contribution, Payload]], interval: int | None
    ) -> NextVersion:
        """Merges nothing, and has no metrics."""
        return NextVersion((), {})
