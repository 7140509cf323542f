"""Objects of the simulation as JSON values and arrays, and back: known classes only, every field of them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class GraphError(ValueError):
    """An object cannot be written, or JSON values cannot be read, as objects of known classes; one line."""


class Vocabulary:
    """The classes that may be written and read.

    Dataclasses and enums are values: they are read as new objects, and several references to one mutable
    object stay so. Others are owners: each is read into one that is there, of the same class.
    """

    def __init__(self, values: Iterable[type], owners: Mapping[type, Sequence[str]]) -> None:
        """`owners`: with those of their fields that are no state, as settings and owners known elsewhere."""
        values = list(values)
        self.values = {class_name(cls): cls for cls in values}
        assert len(self.values) == len(values), "two classes have one name"
        self.owners = {cls: frozenset(without) for cls, without in owners.items()}


def class_name(cls: type) -> str:
    """What a class is called in what is written: its module's own name, and its name there."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__qualname__}"


class Writer:
    """Writes objects of one document, whose arrays go into one table, each once."""

    def __init__(self, vocabulary: Vocabulary, named: Mapping[str, Any]) -> None:
        """`named` objects are written as their names: the reader has others in their place."""
        self.arrays: list[Any] = []
        self._vocabulary = vocabulary
        self._named = {id(thing): name for name, thing in named.items()}
        self._seen: dict[int, tuple[int, Any]] = {}  # the object is kept, lest another gets its id
        self._places: dict[Any, int] = {}

    def name(self, name: str, thing: Any) -> None:
        """From now on the object is written as this name."""
        self._named[id(thing)] = name

    def write(self, thing: Any) -> Any:
        """The object as JSON values.

        Raises:
          GraphError: it, or something that it refers to, is of no known class.
        """
        if thing is None or type(thing) in (bool, int, str):
            return thing
        if type(thing) is float:
            return thing if math.isfinite(thing) else {"float": repr(thing)}
        if id(thing) in self._named:
            return {"named": self._named[id(thing)]}
        if type(thing) is random.Random:
            return {"random": _random_state(thing)}
        if hasattr(thing, "dtype") and hasattr(thing, "shape"):
            return self._array(thing)
        if isinstance(thing, list | tuple | set | frozenset | dict | collections.deque):
            return self._container(thing)
        cls = type(thing)
        if self._vocabulary.values.get(class_name(cls)) is cls:
            return self._value(thing)
        if cls in self._vocabulary.owners:
            return {"owner": class_name(cls), "fields": self.fields(thing)}
        raise GraphError(f"{cls.__module__}.{cls.__qualname__} cannot be recorded")

    def fields(self, owner: Any) -> dict[str, Any]:
        """The fields of an owner that are its state; raises GraphError as `write` does."""
        without = self._vocabulary.owners[type(owner)]
        return {name: self.write(value) for name, value in vars(owner).items() if name not in without}

    def _container(self, thing: Any) -> Any:
        if type(thing) is list:
            return [self.write(x) for x in thing]
        if type(thing) in (set, frozenset):
            return {type(thing).__name__: [self.write(x) for x in sorted(thing)]}
        if type(thing) in (tuple, collections.deque):
            return {type(thing).__name__: [self.write(x) for x in thing]}
        if type(thing) in (dict, collections.Counter):
            pairs = [[self.write(key), self.write(value)] for key, value in thing.items()]
            return {type(thing).__name__: pairs}
        raise GraphError(f"{type(thing).__module__}.{type(thing).__qualname__} cannot be recorded")

    def _value(self, thing: Any) -> Any:
        name = class_name(type(thing))
        if isinstance(thing, enum.Enum):
            return {"enum": name, "name": thing.name}
        told: dict[str, Any] = {"value": name}
        if not type(thing).__dataclass_params__.frozen:
            if id(thing) in self._seen:
                return {"same": self._seen[id(thing)][0]}
            told["number"] = len(self._seen)
            self._seen[id(thing)] = told["number"], thing
        return told | {
            "fields": {f.name: self.write(getattr(thing, f.name)) for f in dataclasses.fields(thing)}
        }

    def _array(self, array: Any) -> Any:
        if not array.shape:
            return {"scalar": np.asarray(array).item(), "dtype": np.dtype(array.dtype).name}
        key: Any = id(array)
        if isinstance(array, np.ndarray):  # several views of the same memory are one array
            key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)
        if key not in self._places:
            self._places[key] = len(self.arrays)
            self.arrays.append(array)
        return {"array": self._places[key]}


class Reader:
    """Reads what a Writer wrote, strictly."""

    def __init__(
        self, vocabulary: Vocabulary, named: Mapping[str, Any], arrays: Mapping[int, Any] | Sequence[Any]
    ) -> None:
        """`named` objects by the names under which they were written."""
        self._vocabulary = vocabulary
        self._owners = {class_name(cls): cls for cls in vocabulary.owners}
        self._named = dict(named)
        self._arrays = arrays
        self._seen: dict[int, Any] = {}

    def name(self, name: str, thing: Any) -> None:
        """From now on the name stands for this object."""
        self._named[name] = thing

    def read(self, told: Any) -> Any:
        """The object.

        Raises:
          GraphError: a class, a name or an array is unknown, or a class has other fields.
        """
        if told is None or type(told) in (bool, int, str, float):
            return told
        if type(told) is list:
            return [self.read(x) for x in told]
        if type(told) is not dict or not told:
            raise GraphError(f"{told!r} is no object")
        kind, what = next(iter(told.items()))
        match kind:
            case "float":
                return float(what)
            case "named":
                return _of(self._named, what, "name")
            case "random":
                return _random_from(what)
            case "array":
                return self._array(what)
            case "scalar":
                return np.dtype(told["dtype"]).type(what)
            case "tuple" | "set" | "frozenset" | "deque":
                return _CONTAINERS[kind](map(self.read, what))
            case "dict" | "Counter":
                return _CONTAINERS[kind]({self.read(key): self.read(value) for key, value in what})
            case "enum":
                return _of(_of(self._vocabulary.values, what, "class").__members__, told["name"], what)
            case "value":
                return self._value(told)
            case "same":
                return _of(self._seen, what, "object")
        raise GraphError(f"{kind!r} is no kind of object that can be read")

    def fill(self, owner: Any, fields: Any) -> None:
        """Puts the state that `Writer.fields` told into an owner; raises GraphError as `read` does."""
        name = class_name(type(owner))
        without = self._vocabulary.owners[type(owner)]
        known = vars(owner).keys() - without
        if type(fields) is not dict or fields.keys() != known:
            raise GraphError(f"{name} has other fields: {_difference(fields, known)}")
        for field, told in fields.items():
            if isinstance(told, dict) and "owner" in told:
                inner = getattr(owner, field)
                if self._owners.get(told["owner"]) is not type(inner):
                    raise GraphError(f"{name}.{field} was {told['owner']}, is {class_name(type(inner))}")
                self.fill(inner, told["fields"])
            else:
                setattr(owner, field, self.read(told))

    def _array(self, place: Any) -> Any:
        try:
            return self._arrays[place]
        except (LookupError, TypeError):
            raise GraphError(f"array {place!r} is missing") from None

    def _value(self, told: Mapping[str, Any]) -> Any:
        cls = _of(self._vocabulary.values, told["value"], "class")
        names = {f.name for f in dataclasses.fields(cls)}
        if told["fields"].keys() != names:
            raise GraphError(f"{class_name(cls)} has other fields: {_difference(told['fields'], names)}")
        made = cls.__new__(cls)
        if "number" in told:  # before its fields: they may refer to it
            self._seen[told["number"]] = made
        for field, value in told["fields"].items():
            object.__setattr__(made, field, self.read(value))
        return made


_CONTAINERS: dict[str, Any] = {
    cls.__name__: cls for cls in (tuple, set, frozenset, dict, collections.deque, collections.Counter)
}


def _of(table: Mapping[Any, Any], key: Any, what: str) -> Any:
    try:
        return table[key]
    except (KeyError, TypeError):
        raise GraphError(f"{what} {key!r} is unknown") from None


def _difference(fields: Any, known: Iterable[str]) -> str:
    return ", ".join(sorted({*fields} ^ {*known})) if isinstance(fields, dict) else repr(fields)


def _random_state(rng: random.Random) -> list[Any]:
    version, (*words, position), gauss = rng.getstate()
    return [version, np.array(words, "<u4").tobytes().hex(), position, gauss]


def _random_from(told: Any) -> random.Random:
    rng = random.Random()
    try:
        version, words, position, gauss = told
        words = np.frombuffer(bytes.fromhex(words), "<u4").tolist()
        rng.setstate((version, (*words, position), gauss))
    except (TypeError, ValueError):
        raise GraphError("the state of a random stream is none") from None
    return rng
