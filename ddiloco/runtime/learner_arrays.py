"""The arrays of one learner: train state, batches, snapshots. What the learner of any driver works on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from ddiloco.runtime.delivery import Pieces
from ddiloco.runtime.transfer import FragmentTransfer
from ddiloco.training.program import TrainProgram
from ddiloco.training.step import Metrics, TrainState

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Equipment:
    """What a learner works with; programs may be shared by learners on the same mesh."""

    program: TrainProgram
    transfer: FragmentTransfer
    batches: Iterator[Batch]
    steps_in_flight: int
    min_step_seconds: float = 0.0


class TrainingArrays:
    """Owned by the thread that steps. Every call is ordered after the steps handed out before it."""

    def __init__(self, equipment: Equipment) -> None:
        self._equipment = equipment
        self._state: TrainState | None = None

    def adopt(self, fragments: Sequence[Pieces]) -> None:
        """Loads every fragment of a welcome; the inner optimizer begins anew."""
        whole = self._equipment.transfer.whole(fragments)
        self._state = self._equipment.program.state_from(whole)

    def step(self, clock: int) -> tuple[int, Metrics]:
        """Hands the next inner step to the devices; its tokens, and metrics that may still be under way.

        `clock` is the number of steps before this one.
        """
        batch = next(self._equipment.batches)
        self._state, metrics = self._equipment.program.step(self._state, batch, clock)
        return int(batch["weights"].sum()), metrics

    def snapshot(self, fragment: int) -> tuple[jax.Array, ...]:
        """Copies of the fragment's pieces on the devices, with their copy to the host under way."""
        return self._equipment.transfer.snapshot(fragment, self._state.params)

    def apply(self, fragment: int, mixing: float, pieces: Pieces) -> None:
        """theta_p <- (1 - mixing) Theta_p + mixing theta_p."""
        params = self._equipment.transfer.apply(fragment, self._state.params, pieces, mixing)
        self._state = dataclasses.replace(self._state, params=params)

    def lose(self) -> None:
        """Lets go of the state, as when a process dies. Batches already drawn stay drawn."""
        self._state = None

    @property
    def params(self) -> Mapping[str, jax.Array]:
        """The parameters after the last step handed out."""
        return self._state.params
