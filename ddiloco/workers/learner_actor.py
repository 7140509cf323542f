"""A learner as an actor: carries out its core's actions on its arrays, the same in every driver.

It has no thread, clock or channel: a driver starts and completes steps, passes deliveries and the time, and
sends the learner's messages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ddiloco.data.errors import DataError
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.work import LearnerWork
from ddiloco.telemetry.records import reason
from ddiloco.workers.exchange import InnerState, fragments_with

UNUSABLE_POSITION = (DataError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What is raised where data cannot go on at a position: it comes from the syncer, and may be anything."""

Payload = Any  # the arrays of a fragment; None where there are no arrays


class LearnerArrays(Protocol):
    """The arrays of one learner's process. Every call takes effect after the steps handed out before it."""

    def adopt(self, fragments: Sequence[Payload], inner: Any = None) -> None:
        """Loads every fragment that came with a welcome, and an inner state; None: a fresh one."""

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
        """Applies an ApplyUpdate."""

    def state(self) -> tuple[Any, Any]:
        """All that the next steps depend on, for `restore`: arrays, and JSON values."""

    def restore(self, arrays: Any, values: Any) -> None:
        """Loads what `state` gave."""

    def lose(self) -> None:
        """The process has died, and its memory is lost."""


class LearnerDriver(Protocol):
    """The calls of a learner's actor on its driver. No call but `inner_state` waits."""

    def handled(self, event: events.LearnerEvent, decided: Sequence[Any], now: float) -> None:
        """The core has decided on an event; nothing of it is carried out yet."""

    def send(self, event: events.FromLearner, shard: int) -> None:
        """Sends an event to a shard of the syncer."""

    def send_offer(self, offer: events.FragmentArrived, arrays: Payload) -> None:
        """Sends an offer to the syncer, once its arrays are on the host."""

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        """The inner state for a learner welcomed with these versions; None: a fresh one."""

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a line of the metrics."""

    def alarm(self, problem: str) -> None:
        """Reports a problem after which the learner continues."""

    def leave(self, why: str) -> None:
        """Ends the process."""


class LearnerActor:
    """One process of a learner, which ends with it.

    Attributes:
      core: makes the decisions.
      arrays: carry them out.
      trained: steps in the inner state.
    """

    def __init__(self, core: LearnerCore, arrays: Any, driver: LearnerDriver, trained: int = 0) -> None:
        self.core, self.arrays, self.trained = core, arrays, trained
        self._driver = driver
        # By the steps (`Watermark.steps`) of an offer that may be sent yet: where the data stood, JSON
        self._positions: dict[int, str] = {}
        self._updates = 0  # applied since the last step
        self._welcome: dict[int, Payload] = {}  # by fragment, the received part of an incomplete welcome

    def join(self) -> None:
        """Asks the syncer to let it take part."""
        self.perform(self.core.join())

    def resume(self, work: LearnerWork, data: Watermark = NOTHING_MERGED) -> list[actions.LearnerAction]:
        """Continues an earlier process, whose arrays are loaded; returns the actions to carry out.

        `data`: the furthest work of the learner that may be merged, behind which its data continue.
        """
        decided = self.core.resume(work, data)
        self._keep_position(self.core.reached.steps)
        return decided

    def step(self) -> tuple[int, Mapping[str, Any]]:
        """Hands the next step to the devices; its tokens and metrics. A StepStarted is to follow.

        Among the metrics, `updates` is the number of those applied since the step before, if there were any.
        """
        tokens, metrics = self.arrays.step(self.core.clock)
        self.trained += 1
        updates, self._updates = self._updates, 0
        return tokens, {**metrics, "updates": updates} if updates else metrics

    def handle(self, event: events.LearnerEvent, now: float, fragments: Sequence[Payload] = ()) -> None:
        """Handles an event, with the fragments that it carries (`fragments_with`)."""
        decided = self.core.handle(event, now)
        self._driver.handled(event, decided, now)
        came = dict(zip(fragments_with(event), fragments, strict=True)) if fragments else {}
        if isinstance(event, events.Welcomed) and not any(isinstance(a, actions.Drop) for a in decided):
            self._welcome.update(came)
        self.perform(decided, came)

    def perform(self, decided: Sequence[actions.LearnerAction], came: Mapping[int, Payload] = {}) -> None:
        """Carries out what the core has decided, in order; `came`: fragments that did with the event."""
        for action in decided:
            self._perform(action, came)

    def _perform(self, action: actions.LearnerAction, came: Mapping[int, Payload]) -> None:
        driver, arrays = self._driver, self.arrays
        match action:
            case actions.SendToSyncer(event, shard):
                driver.send(event, shard)
            case actions.EndProcess(why):
                driver.leave(why)
            case actions.AdoptAll(versions=versions, position=position):
                self._adopt(versions, position)
            case actions.DrawFrom(position):
                self.draw_from(position)
            case actions.MakeOffer(contribution=c):
                arrays.offer(c.fragment, c.upto.steps)
                self._keep_position(c.upto.steps)
            case actions.SendOffer(which, c):
                upto = dataclasses.replace(c.upto, position=self._positions[c.upto.steps])
                offer = events.FragmentArrived(which, dataclasses.replace(c, upto=upto))
                driver.send_offer(offer, arrays.offered(c.fragment, c.upto.steps))
            case actions.ApplyUpdate():
                p, welcomed = action.fragment, self._welcome.pop(action.fragment, None)
                payload = came.get(p, welcomed)
                arrays.apply(p, action.mixing, payload, action.merged, action.rebase)
                self._updates += 1
            case actions.Drop(learner, why):
                driver.record("drop", {"learner": learner, "reason": why})

    def _keep_position(self, steps: int) -> None:
        """Stores the data position after so many steps; drops positions without an offer."""
        position, offered = self.arrays.position(), self.core.offered
        self._positions = {made: known for made, known in self._positions.items() if made in offered}
        self._positions[steps] = json.dumps(position) if position else ""

    def _adopt(self, versions: tuple[int, ...], position: str | None) -> None:
        inner = self._driver.inner_state(versions)
        fragments = [self._welcome.pop(p) for p in range(len(versions))]
        self.arrays.adopt(fragments, None if inner is None else inner.arrays)
        self.trained = 0 if inner is None else inner.trained
        if position is not None:
            self.draw_from(position)

    def draw_from(self, position: str) -> None:
        """Continues the data at a position; on failure they start over, which must not kill the learner."""
        try:
            self.arrays.draw_from(json.loads(position) if position else None)
        except UNUSABLE_POSITION as error:
            self._driver.alarm(f"its data begin again: {reason(error)}")
            self.arrays.draw_from(None)
