"""The arrays of one learner under any driver: train state, batches, offers."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from ddiloco.arrays.blocks import Blocks
from ddiloco.protocol.learner import KEPT_OFFERS
from ddiloco.storage.learner_state import named, numbered, of_kind
from ddiloco.storage.starts import node
from ddiloco.training.step import checksums
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.transfer import FragmentTransfer, Offer

if TYPE_CHECKING:
    from ddiloco.training.step import Metrics, TrainState

Batch = Any  # what the program's step takes
Erred = Callable[[int, list[str]], None]
"""Takes a step whose repetition gave another result, and the devices of this process that differ."""


class BatchSource(Protocol):
    """An endless iterator of batches that can continue where another process of the learner stopped."""

    def __next__(self) -> Batch:
        """The next batch."""

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as JSON values for `set_state`."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from where `state` was taken; raises DataError if that was another stream."""


class Program(Protocol):
    """One learner's inner step on its own devices; also makes and copies its state.

    Attributes:
      mesh: the devices.
      shardings: of each parameter, by name.
      inner_leaves: shape and dtype of each array of the state that is not a parameter.
    """

    mesh: Mesh
    shardings: Mapping[str, Sharding]
    inner_leaves: list[jax.ShapeDtypeStruct]

    def tokens(self, batch: Batch) -> int:
        """The batch's tokens, by which the learner's work is weighted."""

    def step(self, state: TrainState, batch: Batch, clock: int) -> tuple[TrainState, Metrics]:
        """Hands one step to the devices; `clock` steps came before it. `state` may be donated."""

    def state_from(
        self, params: Mapping[str, np.ndarray], inner: Sequence[np.ndarray] | None = None
    ) -> TrainState:
        """A state with copies of these host parameters and of this inner state; None: a fresh inner state."""

    def copy(self, state: TrainState) -> TrainState:
        """A copy of the state after the last step handed out."""

    def inner_state(self, state: TrainState) -> list[jax.Array]:
        """A copy of the inner state's arrays, on its way to the host."""


DEVICE_OFFERS = 4
"""Offers whose copies stay on the devices, the last ones: as many as are on their way where links keep up."""

STEPS_IN_FLIGHT = 2
"""Steps handed to the devices before the oldest is complete: enough that they never wait for the host."""


@dataclasses.dataclass(frozen=True)
class Equipment:
    """A learner's programs, which learners on the same mesh may share, and data."""

    program: Program
    transfer: FragmentTransfer
    batches: BatchSource
    min_step_seconds: float = 0.0
    verify_every: int = 0
    step_flops: float | None = None  # the model's operations in a step; None: not known
    peak_flops: float | None = None  # operations a second of the program's devices; None: not known
    share: int = 1  # one in so many of the learner's hosts is there


class TrainingArrays:
    """Owned by the thread that steps. Every call takes effect after the steps handed out before it.

    If offers are outer gradients, the devices also keep the adopted version of each fragment, 4 bytes a
    parameter. Error feedback takes as much again, for what encodings left out. Of offers that may yet be
    merged they have the last DEVICE_OFFERS, of all fragments together; older ones are in the hosts' memory.
    """

    def __init__(
        self,
        equipment: Equipment,
        erred: Erred = lambda step, devices: None,
    ) -> None:
        """Has no state yet."""
        self._equipment = equipment
        self._erred = erred
        self._steps = 0
        self.data_wait = 0.0  # seconds that the last step waited for its batch
        self._state: TrainState | None = None
        self._anchors: dict[int, tuple[jax.Array, ...]] = {}  # by fragment, the version adopted
        self._residuals: dict[int, tuple[jax.Array, ...]] = {}  # the next offers send it along
        # By fragment and steps, since an update had some of the work
        self._offers: dict[int, dict[int, Offer]] = {}
        self._on_devices: collections.deque[tuple[int, int]] = collections.deque()  # their last offers

    def adopt(self, fragments: Sequence[Pieces], inner: Sequence[np.ndarray] | None = None) -> None:
        """Loads all fragments of a welcome and an inner state; error feedback starts from zero.

        `inner` None: a fresh one.
        """
        transfer = self._equipment.transfer
        self.lose()  # the devices may not hold two
        self._state = self._settled(self._begun(fragments, inner))
        if transfer.keeps_anchors:
            self._anchors = {p: transfer.place(p, pieces) for p, pieces in enumerate(fragments)}
        if transfer.error_feedback:
            self._residuals = {p: jax.tree.map(jnp.zeros_like, a) for p, a in self._anchors.items()}

    def _begun(self, fragments: Sequence[Pieces], inner: Sequence[np.ndarray] | None) -> TrainState:
        """A state of these fragments and this inner state."""
        return self._equipment.program.state_from(self._equipment.transfer.whole(fragments), inner)

    def _settled(self, arrays: Any) -> Any:
        """The arrays; a host of several on CPU devices waits until these have made them."""
        return arrays

    def step(self, clock: int) -> tuple[int, Metrics]:
        """Hands the next inner step to the devices; its tokens, and metrics that may still be under way.

        `clock` is the number of steps before this one. A step that is verified is computed twice and waited
        for; if the results differ in any bit, it is skipped.
        """
        asked = time.monotonic()
        batch, tokens = self._drawn()
        self.data_wait = time.monotonic() - asked
        self._steps += 1
        every = self._equipment.verify_every
        if every and self._steps % every == 0:
            return tokens, self._verified_step(batch, clock)
        self._state, metrics = self._settled(self._equipment.program.step(self._state, batch, clock))
        return tokens, metrics

    def _verified_step(self, batch: Batch, clock: int) -> Metrics:
        """Needs the memory of a second state: checksums are compared, since a third would rarely fit."""
        program, before = self._equipment.program, self._state
        first = checksums(self._settled(program.step(self._settled(program.copy(before)), batch, clock)))
        after, metrics = self._settled(program.step(self._settled(program.copy(before)), batch, clock))
        second = checksums((after, metrics))
        differing = [device for device in first if first[device] != second[device]]
        if self._differs_anywhere(bool(differing)):
            self._erred(clock + 1, [f"{device} of {node()}" for device in differing])
            return {**metrics, **dict.fromkeys(("skipped", "corrupt"), jnp.ones((), jnp.int32))}
        self._state = after
        return metrics

    def _differs_anywhere(self, here: bool) -> bool:
        """Whether a verified step gave other bits on any host of the learner."""
        return here

    def _drawn(self) -> tuple[Batch, int]:
        """The next batch, and its tokens."""
        batch = next(self._equipment.batches)
        return batch, self._equipment.program.tokens(batch)

    def offer(self, fragment: int, steps: int) -> Offer:
        """The fragment after the last step handed out, encoded; its copy to the host is under way.

        `steps`: of its `Watermark`; they name the offer until an update of the fragment is applied.
        """
        anchor, residual = self._anchors.get(fragment, ()), self._residuals.get(fragment, ())
        offer = self._equipment.transfer.offer(fragment, self._state.params, anchor, residual)
        self._settled((offer.arrays, offer.residual, offer.own))
        kept = self._offers.setdefault(fragment, {})
        kept[steps] = offer
        if len(kept) > KEPT_OFFERS:
            del kept[next(iter(kept))]
        if (fragment, steps) in self._on_devices:  # made again, as none came between
            self._on_devices.remove((fragment, steps))
        self._on_devices.append((fragment, steps))
        if len(self._on_devices) > DEVICE_OFFERS:
            p, made = self._on_devices.popleft()
            if (old := self._offers.get(p, {}).get(made)) is not None:
                self._offers[p][made] = old.stowed()
        return offer

    def offered(self, fragment: int, steps: int) -> Offer:
        """The offer that was made then."""
        offer = self._offers.get(fragment, {}).get(steps)
        # Of one that was restored at most that is there by which an update is applied: no step was since.
        return self.offer(fragment, steps) if offer is None or not offer.arrays else offer

    def apply(
        self, fragment: int, mixing: float, pieces: Pieces, merged: int | None = None, rebase: bool = False
    ) -> None:
        """theta_p <- (1 - mixing) Theta_p + mixing theta_p, or with `rebase` Theta_p + theta_p - then.

        `then` is theta_p as it was offered after `merged` steps, which the update contains, on the version
        before; or with None that version: then nothing more of the learner's work is merged, and its offers
        may be yet.

        The next offers hold the difference to Theta_p. If the update contains an offer, they also send what
        that one left out, without the share `mixing`, which stays in theta_p; otherwise still what earlier
        ones left out.
        """
        transfer, offers = self._equipment.transfer, self._offers.pop(fragment, {})
        offer, placed = offers.get(merged), transfer.place(fragment, pieces)
        anchor = self._anchors.get(fragment, ())
        if rebase and merged is None:
            self._offers[fragment] = offers
            then = anchor, ()
        else:
            then = (anchor, offer.own) if rebase and offer is not None else ((), ())
        params = transfer.apply(fragment, self._state.params, placed, mixing, *then)
        self._state = dataclasses.replace(self._state, params=self._settled(params))
        if transfer.keeps_anchors:
            self._anchors[fragment] = placed
        if offer is not None and offer.residual:
            left = transfer.place(fragment, offer.residual)
            self._residuals[fragment] = tuple((1 - mixing) * x for x in left) if mixing else left

    def inner(self) -> list[jax.Array]:
        """A copy of the inner state after the last step handed out, on its way to the host."""
        return self._settled(self._equipment.program.inner_state(self._state))

    def position(self) -> dict[str, Any]:
        """Where the batches stand after the last step handed out; JSON values."""
        return self._equipment.batches.get_state()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that the next steps depend on, after the last step handed out, for `restore`.

        Returns:
          Arrays on their way to the host, which later steps do not change: `params/<name>`, `inner/<i>` in
          the order of `Program.inner_leaves`, `anchor/<p>/<i>` and `residual/<p>/<i>` where they are kept,
            and of offers that are kept, by their steps, what an update that has them needs:
          `own/<p>/<steps>/<i>` and `left/<p>/<steps>/<i>`; none of these before the first welcome. And JSON
          values: `position` of the batches, and `steps` of this process.
        """
        arrays: dict[str, Any] = {}
        if self._state is not None:
            copy = self._equipment.program.copy(self._state)
            arrays |= named("params", copy.params) | named("inner", jax.tree.leaves(copy.opt_state))
        for kind, held in self._held.items():
            for p, pieces in held.items():
                arrays |= named(f"{kind}/{p}", pieces)
        for p, kept in self._offers.items():
            for steps, offer in kept.items():
                arrays |= named(f"own/{p}/{steps}", offer.own) | named(f"left/{p}/{steps}", offer.residual)
        for array in arrays.values():
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
        return self._settled(arrays), {"position": self.position(), "steps": self._steps}

    def restore(self, arrays: Mapping[str, np.ndarray | Blocks], values: Mapping[str, Any]) -> None:
        """Loads what `state` gave, under the same layout, inner optimizer and codec.

        Raises:
          DataError: the position belongs to another stream.
          KeyError, ValueError: arrays are missing.
        """
        program, transfer = self._equipment.program, self._equipment.transfer
        self.draw_from(values["position"])
        self.lose()  # the devices may not hold two states
        self._steps = values["steps"]
        self._state = self._settled(program.state_from(of_kind("params", arrays), numbered("inner", arrays)))
        for kind, held in self._held.items():
            found = of_kind(kind, arrays)
            for p in sorted({int(name.partition("/")[0]) for name in found}):
                held[p] = transfer.place(p, numbered(str(p), found))
        own, left = of_kind("own", arrays), of_kind("left", arrays)
        for key in dict.fromkeys(name.rpartition("/")[0] for name in [*own, *left]):
            p, steps = map(int, key.split("/"))
            residual, kept = (tuple(numbered(key, found)) for found in (left, own))
            self._offers.setdefault(p, {})[steps] = Offer((), residual, kept)

    def draw_from(self, position: dict[str, Any] | None) -> None:
        """Moves the batches; None: to their start, where they must be."""
        if position:
            self._equipment.batches.set_state(position)

    @property
    def _held(self) -> dict[str, dict[int, Any]]:
        return {"anchor": self._anchors, "residual": self._residuals}

    def lose(self) -> None:
        """Drops the state, as when a process dies; batches already read are not read again."""
        self._state = None
        self._offers.clear()
        self._on_devices.clear()
        for held in self._held.values():
            held.clear()

    @property
    def params(self) -> Mapping[str, jax.Array]:
        """The parameters after the last step handed out; none before the welcome, and once they are lost."""
        return {} if self._state is None else self._state.params
