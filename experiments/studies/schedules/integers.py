"""Parameters of one integer a fragment, so that what schedules merge is known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol.learner import KEPT_OFFERS
from ddiloco.virtual.array_ports import CountingLearner

Pieces = tuple[int, ...]  # one integer
MAX_MOVE = 1000


class Parameters(NamedTuple):
    """A learner's parameters, all that happened before carried out, and the versions that were ever made."""

    theta: Sequence[int]  # by fragment
    moved: int  # what the last step added to fragment 0
    versions: Mapping[tuple[int, int, int], int]  # by fragment, version and lineage


def of_fragment(fragment: int, moved: int) -> int:
    """What steps that add `moved` to fragment 0 add to another: each has its own, to be told apart."""
    return (fragment + 1) * moved


class IntegerLearner(CountingLearner):
    """A learner whose offers and updates are those of `TrainingArrays` with rebase."""

    def __init__(self, tokens: Callable[[], int], skips: Callable[[], bool], moves: random.Random) -> None:
        super().__init__(tokens, skips)
        self.theta: list[int] = []
        self.moved = 0
        self._moves = moves
        self._anchors: list[int] = []  # the versions applied
        self._offers: dict[int, dict[int, int]] = {}  # outer gradients by fragment and steps

    def parameters(self, versions: Mapping[tuple[int, int, int], int]) -> Parameters:
        """Its parameters beside these versions."""
        return Parameters(self.theta, self.moved, versions)

    def adopt(self, fragments: Sequence[Pieces], inner: Any = None) -> None:
        """The fragments of a welcome."""
        self.theta = [value for (value,) in fragments]
        self._anchors, self._offers = list(self.theta), {}

    def step(self, clock: int) -> tuple[int, Mapping[str, Any]]:
        """Adds to each fragment, unless the step is skipped."""
        tokens, metrics = super().step(clock)
        self.moved = 0 if metrics else self._moves.randint(1, MAX_MOVE)
        self.theta = [value + of_fragment(p, self.moved) for p, value in enumerate(self.theta)]
        return tokens, metrics

    def offer(self, fragment: int, steps: int) -> None:
        """Keeps the outer gradient."""
        kept = self._offers.setdefault(fragment, {})
        kept[steps] = self._anchors[fragment] - self.theta[fragment]
        if len(kept) > KEPT_OFFERS:
            del kept[next(iter(kept))]

    def offered(self, fragment: int, steps: int) -> Pieces:
        """The outer gradient that was kept."""
        return (self._offers[fragment][steps],)

    def apply(
        self, fragment: int, mixing: float, payload: Pieces, merged: int | None = None, rebase: bool = False
    ) -> None:
        """Theta, and with `rebase` the displacement since the merged offer or the version before."""
        offers, anchor = self._offers.pop(fragment, {}), self._anchors[fragment]
        [self._anchors[fragment]] = payload
        if rebase and merged is None:
            self._offers[fragment] = offers
        then = anchor - offers[merged] if merged is not None else anchor
        own = self.theta[fragment] - then if rebase else 0
        self.theta[fragment] = self._anchors[fragment] + own

    def state(self) -> tuple[Any, int]:
        """Parameters and offers, and the number of batches read."""
        offers = {p: dict(kept) for p, kept in self._offers.items()}
        return (list(self.theta), list(self._anchors), offers), self.drawn

    def restore(self, arrays: Any, values: int) -> None:
        """Goes on with these."""
        theta, anchors, offers = arrays
        self.theta, self._anchors = list(theta), list(anchors)
        self._offers = {p: dict(kept) for p, kept in offers.items()}
        self.drawn = values
