"""A user's loop as a learner runs it: its parameters by name, apart from the rest of its state."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ddiloco.arrays.blocks import Blocks, Cut, needed, placed
from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.data.host_batches import HostBatch
from ddiloco.outer.fragments import leaf_names
from ddiloco.training.loop import Loop, Place
from ddiloco.training.step import Metrics, TrainState


class LoopProgram:
    """One learner's loop on its devices; a `Program` of `ddiloco.workers.learner_arrays`.

    In its TrainState `params` are the loop's parameters by name, and `opt_state` is the list of all other
    arrays of its state. Leaves that are no arrays, such as functions, stay as `init` made them.
    """

    def __init__(self, loop: Loop, place: Place) -> None:
        """Calls `init` to see its state; raises ConfigError if `params` gives no float32 leaves."""
        self.loop, self.mesh = loop, place.mesh
        self._device = place.mesh.local_devices[0]
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))
        state = self._begun()
        self._all, self._structure = jax.tree.flatten(state)
        self._slots, self._params_structure = _parameters(loop.params(state), self._all)
        taken = set(self._slots.values())
        self._rest = [i for i, leaf in enumerate(self._all) if i not in taken and isinstance(leaf, jax.Array)]
        self.shardings: dict[str, Sharding] = {n: self._all[i].sharding for n, i in self._slots.items()}
        self.shapes = {name: self._all[i].shape for name, i in self._slots.items()}
        leaves = [_raw(self._all[i]) for i in self._rest]
        self.inner_leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        self._keys = {i: jax.random.key_impl(self._all[i]) for i in self._rest if _is_key(self._all[i])}
        self._all = [_abstract(leaf) for leaf in self._all]

    def compile(self, others: Sequence[Loop] = ()) -> None:
        """Takes a step on a scratch state; raises ConfigError for invalid results of the loop.

        `others`: loops whose batches come together with this one's.
        """
        drawn = [next(iter(loop.batches()), None) for loop in (self.loop, *others)]
        if any(batch is None for batch in drawn):
            raise ConfigError("loop.batches: gave no batch, but must give an endless iterator of them")
        batch = _joined(drawn)
        self.tokens(batch)
        # In the structure of the first `init`, as all states are: those of two NNX modules are never equal.
        state = self._whole(self._parted(jax.tree.leaves(self._begun())))
        with jax.default_device(self._device):
            returned = jax.block_until_ready(self.loop.step(state, batch))
        if not (isinstance(returned, tuple) and len(returned) == 2):
            problem = f"gives {type(returned).__name__}, but must give a pair (state, metrics)"
            raise ConfigError(f"loop.step: {problem}")
        stepped, metrics = returned
        if not isinstance(metrics, Mapping) or any(np.ndim(value) for value in metrics.values()):
            raise ConfigError('loop.step: its metrics must be a dict of scalars by name, as {"loss": loss}')
        leaves, structure = jax.tree.flatten(stepped)
        if structure != self._structure:  # type: ignore[operator]  # JAX's stub lacks it
            raise ConfigError("loop.step: gives a state of another structure than init")
        for before, after in zip(self._all, leaves, strict=True):
            if isinstance(before, jax.ShapeDtypeStruct) and _dtype_and_shape(before) != _dtype_and_shape(
                after
            ):
                problem = (
                    f"made {_dtype_and_shape(after)} of an array that init made {_dtype_and_shape(before)}"
                )
                raise ConfigError(f"loop.step: {problem}; shapes and dtypes must stay")
        if self.mesh.is_multi_process:
            self._check_layout(leaves)
        if "loss" not in metrics:
            raise ConfigError(f"loop.step: its metrics are {', '.join(metrics) or 'none'}, but need a loss")

    def _check_layout(self, leaves: Sequence[Any]) -> None:
        """Raises ConfigError where a step lays an array otherwise: hosts know their parts of it by `init`."""
        begun = [(name, i, self.shardings[name]) for name, i in self._slots.items()]
        begun += [(f"leaf {i}", i, at.sharding) for i, at in zip(self._rest, self.inner_leaves, strict=True)]
        for name, i, sharding in begun:
            if not leaves[i].sharding.is_equivalent_to(sharding, leaves[i].ndim):
                problem = f"lays {name} as {leaves[i].sharding}, which init laid as {sharding}"
                raise ConfigError(f"loop.step: {problem}; on several hosts layouts must stay (out_shardings)")

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters of `init`, on the host."""
        leaves = jax.tree.leaves(self._begun())
        return {name: np.asarray(leaves[i]) for name, i in self._slots.items()}

    def tree(self, params: Mapping[str, Any]) -> Any:
        """Parameters by name in the tree that the loop's `params` gives, on its first device."""
        placed = jax.device_put([params[name] for name in self._slots], self._device)
        return jax.tree.unflatten(self._params_structure, placed)

    def tokens(self, batch: Any) -> int:
        """The batch's tokens, as the loop counts them, or its rows."""
        if self.loop.tokens is None:
            first = jax.tree.leaves(batch)[0]
            return len(first) if np.ndim(first) else 1
        counted = self.loop.tokens(batch)
        if not isinstance(counted, int | np.integer):
            raise ConfigError("loop.tokens: must give a whole number, the tokens of a batch")
        return int(counted)  # files of JSON have it, which take no number of NumPy's

    def step(self, state: TrainState, batch: Any, clock: int) -> tuple[TrainState, Metrics]:
        """Takes the loop's own step; a loop counts its steps itself, so `clock` is not used."""
        del clock
        with jax.default_device(self._device):
            stepped, metrics = self.loop.step(self._whole(state), batch)
            return self._parted(jax.tree.leaves(stepped)), {n: jnp.asarray(x) for n, x in metrics.items()}

    def state_from(
        self, params: Mapping[str, np.ndarray], inner: Sequence[np.ndarray] | None = None
    ) -> TrainState:
        """A state with a copy of these host parameters and of this rest; None: the rest of a new `init`."""
        laid = {name: jax.device_put(params[name], self.shardings[name]) for name in self._slots}
        return self.state_of(self._copy(laid), inner)

    def state_of(
        self, params: Mapping[str, jax.Array], inner: Sequence[np.ndarray | Blocks] | None = None
    ) -> TrainState:
        """Like `state_from`, of parameters that are on the devices already, and become the state's."""
        if inner is None:
            return TrainState(dict(params), self._parted(jax.tree.leaves(self._begun())).opt_state)
        at = tuple(leaf.sharding for leaf in self.inner_leaves)
        return TrainState(dict(params), self._copy(list(placed(tuple(inner), at))))

    def inner_needs(self) -> list[Cut]:
        """The blocks of each of `inner_leaves` that this process's devices hold."""
        return [needed(leaf.sharding, leaf.shape) for leaf in self.inner_leaves]

    def zeros(self) -> dict[str, jax.Array]:
        """Zeros in the place of all parameters, on the devices."""
        laid = self.shardings.items()
        return {name: jnp.zeros(self.shapes[name], jnp.float32, device=at) for name, at in laid}

    def copy(self, state: TrainState) -> TrainState:
        """A copy of the state as the last step leaves it, of as much memory on the devices."""
        return self._copy(state)

    def inner_state(self, state: TrainState) -> list[jax.Array]:
        """A copy of the rest of the state as the last step leaves it, on its way to the host."""
        leaves = self._copy(state.opt_state)
        for leaf in leaves:
            leaf.copy_to_host_async()
        return leaves

    def _begun(self) -> Any:
        """A new state of `init`, each array a copy of its own, committed to devices."""
        with jax.default_device(self._device):
            state = self.loop.init()
            spread = self.mesh.is_multi_process or any(
                isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in jax.tree.leaves(state)
            )
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            home = everywhere if spread else SingleDeviceSharding(self._device)
            owned = jax.tree.map(functools.partial(_owned, home=home), state)
            # CPU devices of several processes take up programs in any order.
            return jax.block_until_ready(owned) if self.mesh.is_multi_process else owned

    def _whole(self, state: TrainState) -> Any:
        leaves = list(self._all)
        for name, i in self._slots.items():
            leaves[i] = state.params[name]
        for i, raw in zip(self._rest, state.opt_state, strict=True):
            leaves[i] = jax.random.wrap_key_data(raw, impl=self._keys[i]) if i in self._keys else raw
        return jax.tree.unflatten(self._structure, leaves)

    def _parted(self, leaves: Sequence[Any]) -> TrainState:
        """The leaves apart, each array once: an update gives the memory of parameters to new ones."""
        params = {name: leaves[i] for name, i in self._slots.items()}
        given = {id(leaf) for leaf in params.values()}
        rest = [jnp.copy(leaves[i]) if id(leaves[i]) in given else leaves[i] for i in self._rest]
        return TrainState(params, [_raw(leaf) for leaf in rest])


class LoopBatches:
    """The batches of a loop, with their place among all that it gives: that of the iterator, or a count."""

    def __init__(self, loop: Loop, place: Place) -> None:
        self._loop = loop
        self._iterator: Any  # of batches; it may know its own place
        self._keeps_state: bool
        self._count = 0
        self._whose = {"learner": place.learner, "num_learners": place.num_learners}
        self._begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; raises DataError where the loop has no more."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise DataError(f"loop.batches: ended after {self._count}, but must be endless") from None
        self._count += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """JSON values from which `set_state` goes on after the last batch handed out."""
        state = {**self._whose, "batches": self._count}
        if not self._keeps_state:
            return state
        own = self._iterator.get_state()
        if isinstance(own, bytes):  # as Grain's DataLoader has it
            return {**state, "iterator_bytes": base64.b64encode(own).decode()}
        return {**state, "iterator": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at the position `state`; raises DataError if that is of another learner's batches."""
        if {name: state.get(name) for name in self._whose} != self._whose:
            raise DataError(f"the saved position is {dict(state)}, but must be of batches of {self._whose}")
        saved: Any = state.get("iterator")
        if "iterator_bytes" in state:
            saved = base64.b64decode(state["iterator_bytes"])
        restores = self._keeps_state and saved is not None
        if restores or self._count > state["batches"]:
            self._begin()
        if restores:
            self._iterator.set_state(saved)
            self._count = state["batches"]
        while self._count < state["batches"]:
            next(self)

    def _begin(self) -> None:
        self._iterator, self._count = iter(self._loop.batches()), 0
        self._keeps_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")


class HostLoopBatches(Iterator[HostBatch]):
    """The batches of a learner's loop on one of its hosts; all hosts make the same global batch."""

    def __init__(self, own: LoopBatches, tokens: Callable[[Any], int], host: int) -> None:
        """Host 0 counts the `tokens` of a whole batch."""
        self._own, self._tokens, self._host = own, tokens, host

    def __next__(self) -> HostBatch:
        batch = next(self._own)
        return HostBatch(batch, {} if self._host else {0: self._tokens(batch)})

    def get_state(self) -> dict[str, Any]:
        """This host's position after the last batch, for `joined`."""
        return {"hosts": {str(self._host): self._own.get_state()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at the learner's position; raises DataError if it had other hosts then."""
        own = state.get("hosts", {}).get(str(self._host))
        if own is None:
            raise DataError(f"the saved position is not of a learner with a host {self._host}")
        self._own.set_state(own)

    @staticmethod
    def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The whole learner's state from those of its hosts after the same batch."""
        return {"hosts": {host: own for state in states for host, own in state["hosts"].items()}}


class ConcatenatedBatches:
    """The batches of several learners' loops as one, row after row."""

    def __init__(self, batches: Sequence[LoopBatches]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        """The next batch; raises DataError where one of the loops has no more."""
        return _joined([next(batches) for batches in self._batches])

    def get_state(self) -> dict[str, Any]:
        """JSON values from which `set_state` goes on after the last batch handed out."""
        return {"loops": [batches.get_state() for batches in self._batches]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at the position `state`; raises DataError if that is of other batches."""
        if len(states := state.get("loops", ())) != len(self._batches):
            raise DataError(f"the saved position is of {len(states)} loops, not {len(self._batches)}")
        for batches, own in zip(self._batches, states, strict=True):
            batches.set_state(own)


def _joined(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    try:
        return jax.tree.map(_concatenated, *batches)
    except ValueError as error:
        problem = f"{error}".splitlines()[0]
        raise ConfigError(f"loop.batches: those of several learners cannot be joined: {problem}") from None


def _concatenated(*leaves: Any) -> Any:
    return jnp.concatenate(leaves) if isinstance(leaves[0], jax.Array) else np.concatenate(leaves)


def _parameters(tree: Any, leaves: Sequence[Any]) -> tuple[dict[str, int], Any]:
    """Index of each parameter among the leaves of the state, by name, in the order of the tree's leaves."""
    found, structure = jax.tree.flatten(tree)
    index = {id(leaf): i for i, leaf in enumerate(leaves)}
    names = leaf_names(tree)
    for name, leaf in zip(names, found, strict=True):
        if id(leaf) not in index:
            raise ConfigError(f"loop.params: {name} is no leaf of the state; it must pick leaves as they are")
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise ConfigError(
                f"loop.params: {name} is {_dtype_and_shape(leaf)}, but parameters must be float32"
            )
    if not names:
        raise ConfigError("loop.params: gives no parameter, but must give the leaves that are trained")
    return {name: index[id(leaf)] for name, leaf in zip(names, found, strict=True)}, structure


def _owned(leaf: Any, home: Sharding) -> Any:
    """A copy of an array or number with the same sharding, or with that of `home` if uncommitted."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        return leaf
    array = jnp.array(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
    if isinstance(leaf, jax.Array) and leaf.committed:
        return jax.device_put(array, leaf.sharding)
    if not _is_key(array):
        return jax.device_put(array, home)
    raw = jax.device_put(jax.random.key_data(array), home)
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(array))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> jax.Array:
    """The leaf as an array of numbers, which a random key is not."""
    array = jnp.asarray(leaf)
    return jax.random.key_data(array) if _is_key(array) else array


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def _dtype_and_shape(leaf: Any) -> str:
    """Dtype and shape, such as float32[3,4]."""
    shape = ",".join(map(str, np.shape(leaf)))
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"
