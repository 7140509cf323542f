"""A learner's arrays on several hosts: every host makes the same calls in the same order."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ddiloco.arrays.blocks import Cut, needed
from ddiloco.data.host_batches import HostBatch, HostBatches
from ddiloco.protocol.learner import LearnerCore
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.storage.learner_state import Needs, OfAllHosts, StateOfAllHosts, new_number
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.learner_arrays import Equipment, Erred, TrainingArrays
from ddiloco.workers.transfer import Offer

if TYPE_CHECKING:
    from ddiloco.training.program import TrainProgram
    from ddiloco.training.step import Metrics, TrainState


Copy = TypeVar("Copy", OfAllHosts, StateOfAllHosts)
T = TypeVar("T")


def dropped_with(copy: Copy, order: Callable[[pb.Order], None]) -> Copy:
    """Host 0's part of a copy; once it is no longer referenced, the other hosts drop theirs."""
    weakref.finalize(copy, order, pb.Order(drop=copy.number)).atexit = False
    return copy


def inner_of(equipment: Equipment) -> InnerFormat:
    """The inner optimizer's state, of which this host needs its blocks."""
    program: TrainProgram = equipment.program
    return InnerFormat(program.inner_leaves, program.inner_needs())


def needs_of(equipment: Equipment) -> Needs:
    """The blocks of a learner's arrays that this host needs, by the names of `TrainingArrays.state`."""
    program: TrainProgram = equipment.program
    inner = program.inner_needs()

    def needs(name: str, shape: tuple[int, ...]) -> Cut:
        kind, _, rest = name.partition("/")
        match kind:
            case "params":
                return needed(program.shardings[rest], shape)
            case "inner":
                return inner[int(rest)]
            case _:
                fragment, *_, piece = rest.split("/")
                return equipment.transfer.needs(int(fragment))[int(piece)]

    return needs


class HostArrays(TrainingArrays):
    """One host's part; pieces of fragments are the `Blocks` that its devices need."""

    def __init__(self, equipment: Equipment, erred: Erred) -> None:
        super().__init__(equipment, erred)
        device: jax.Device = equipment.program.mesh.devices.flat[0]
        self._on_cpu = device.platform == "cpu"

    def _settled(self, arrays: Any) -> Any:
        # CPU devices start programs in any order, and two collectives could deadlock.
        return jax.block_until_ready(arrays) if self._on_cpu else arrays

    def _differs_anywhere(self, here: bool) -> bool:
        return bool(np.any(multihost_utils.process_allgather(np.array(here))))  # all must drop the step

    def draw_from(self, position: dict[str, Any] | None) -> None:
        pass  # all hosts have the batches' start already

    def _drawn(self) -> tuple[Any, int]:
        batch: HostBatch = next(self._equipment.batches)
        return batch.rows, sum(batch.tokens.values())

    def _begun(self, fragments: Sequence[Pieces], inner: Sequence[Any] | None) -> TrainState:
        program: TrainProgram = self._equipment.program
        params = program.zeros()
        for p, pieces in enumerate(fragments):  # no host could hold all parameters
            params = self._settled(self._equipment.transfer.apply(p, params, pieces, 0.0))
        return program.state_of(params, inner)


class LeadingArrays(HostArrays):
    """The arrays of host 0, which orders each call from the others before it makes its own.

    The others restore first, since one of them may fail to.
    """

    def __init__(self, equipment: Equipment, erred: Erred, core: LearnerCore, followers: Followers) -> None:
        super().__init__(equipment, erred)
        self._core, self._order = core, followers.order
        self._drawing = False

    def adopt(self, fragments: Sequence[Pieces], inner: Sequence[Any] | None = None) -> None:
        copy = inner.number if isinstance(inner, OfAllHosts) else 0
        which = {"welcomes": self._core.incarnations, "copy": copy, "versions": self._core.versions}
        self._order(pb.Order(adopt=pb.Order.Adopt(**which)))
        super().adopt(fragments, inner)

    def draw_from(self, position: dict[str, Any] | None) -> None:
        """As in TrainingArrays, before the first batch is read; then the other hosts read theirs."""
        if self._drawing:
            raise RuntimeError("another process of the learner has gone on with its data: it must begin anew")
        if position:
            self._equipment.batches.set_state(position)
        self._drawing = True
        self._order(pb.Order(begin=json.dumps(position) if position else ""))

    def step(self, clock: int) -> tuple[int, Metrics]:
        self._order(pb.Order(step=clock))
        return super().step(clock)

    def offer(self, fragment: int, steps: int) -> Offer:
        self._order(pb.Order(offer=pb.Order.Offer(fragment=fragment, steps=steps)))
        return super().offer(fragment, steps)

    def apply(
        self, fragment: int, mixing: float, pieces: Pieces, merged: int | None = None, rebase: bool = False
    ) -> None:
        version, lineage = self._core.versions[fragment], self._core.lineages[fragment]
        which = {"fragment": fragment, "version": version, "lineage": lineage}
        self._order(pb.Order(apply={**which, "mixing": mixing, "merged": merged, "rebase": rebase}))
        super().apply(fragment, mixing, pieces, merged, rebase)

    def inner(self) -> OfAllHosts:
        """As in TrainingArrays; the other hosts keep theirs as long as this one keeps its own."""
        number, arrays = self._copied("copy", super().inner)
        return dropped_with(OfAllHosts(arrays, number), self._order)

    def state(self) -> tuple[StateOfAllHosts, dict[str, Any]]:
        """As in TrainingArrays; likewise."""
        number, (arrays, values) = self._copied("copy_all", super().state)
        return dropped_with(StateOfAllHosts(arrays, number), self._order), values

    def _copied(self, order: str, copy: Callable[[], T]) -> tuple[int, T]:
        """Every host's copy, and its number; the others drop theirs where this one cannot make its own."""
        number = new_number()
        self._order(pb.Order(**{order: number}))
        try:
            return number, copy()
        except Exception:
            self._order(pb.Order(drop=number))
            raise


class JointBatches(Iterator[HostBatch]):
    """Host 0's part of each batch, with the tokens and the position of all hosts."""

    def __init__(self, own: HostBatches, followers: Followers) -> None:
        self._own, self._followers = own, followers
        self._number = 0
        self._state: dict[str, Any] | None = None

    def __next__(self) -> HostBatch:
        rows, tokens = next(self._own)
        self._number += 1
        others = self._followers.drawn(self._number)
        together = dict(tokens)
        for drawn in others:
            together |= zip(drawn.shards, drawn.tokens, strict=True)
        states = [self._own.get_state(), *(json.loads(drawn.position) for drawn in others)]
        self._state = self._own.joined(states)
        return HostBatch(rows, together)

    def get_state(self) -> dict[str, Any] | None:
        """The whole learner's position after the last batch; None: at the start."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves this host; raises DataError if the position is of other data."""
        self._own.set_state(state)
        self._state = state
