"""A user's loop as a learner runs it: its parameters by name, apart from the rest of its state."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
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
        self._device = place.mesh.devices.flat[0]
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

    def compile(self) -> None:
        """Takes a step on a scratch state; raises ConfigError for invalid results of the loop."""
        batch = next(iter(self.loop.batches()), None)
        if batch is None:
            raise ConfigError("loop.batches: gave no batch, but must give an endless iterator of them")
        self.tokens(batch)
        # In the structure of the first `init`, as all states are: those of two NNX modules are never equal.
        state = self._whole(self._parted(jax.tree.leaves(self._begun())))
        with jax.default_device(self._device):
            returned = self.loop.step(state, batch)
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
        if "loss" not in metrics:
            raise ConfigError(f"loop.step: its metrics are {', '.join(metrics) or 'none'}, but need a loss")

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
        own = self._copy({name: jax.device_put(params[name], self.shardings[name]) for name in self._slots})
        if inner is None:
            return TrainState(own, self._parted(jax.tree.leaves(self._begun())).opt_state)
        laid = zip(inner, self.inner_leaves, strict=True)
        return TrainState(own, self._copy([jax.device_put(x, leaf.sharding) for x, leaf in laid]))

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
            spread = any(isinstance(x, jax.Array) and len(x.devices()) > 1 for x in jax.tree.leaves(state))
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            home = everywhere if spread else SingleDeviceSharding(self._device)
            return jax.tree.map(functools.partial(_owned, home=home), state)

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


def _parameters(tree: Any, leaves: Sequence[Any]) -> tuple[dict[str, int], Any]:
    """Index of each parameter among the leaves of the state, by name, in the order of the tree's leaves."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    index = {id(leaf): i for i, leaf in enumerate(leaves)}
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in found]
    if all(name.endswith("/value") for name in names):  # of NNX variables
        names = [name.removesuffix("/value") for name in names]
    for name, (_, leaf) in zip(names, found, strict=True):
        if id(leaf) not in index:
            raise ConfigError(f"loop.params: {name} is no leaf of the state; it must pick leaves as they are")
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise ConfigError(
                f"loop.params: {name} is {_dtype_and_shape(leaf)}, but parameters must be float32"
            )
    if not names:
        raise ConfigError("loop.params: gives no parameter, but must give the leaves that are trained")
    return {name: index[id(leaf)] for name, (_, leaf) in zip(names, found, strict=True)}, structure


def _owned(leaf: Any, home: Sharding) -> Any:
    """A copy of an array or number with the same sharding, or with that of `home` if uncommitted."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        return leaf
    array = jnp.array(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else home
    return jax.device_put(array, sharding)


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
