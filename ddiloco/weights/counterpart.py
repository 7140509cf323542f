"""A model's counterpart in transformers: the entries of its files, its tensors, and the differences."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.telemetry.records import reason

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
# Entries with which the weights are other numbers, or stand in another file
_OTHERWISE = ("quantization_config", "per_layer_config", "transformers_weights")


class Field(NamedTuple):
    """An entry of one of their files that says what is computed."""

    name: str  # theirs
    value: Any  # what it is for our settings
    # The setting of ours that it comes from; None: none, ours always have this value
    setting: str | None = None
    default: Any = None  # the value where a file has no such entry, or null
    written: bool = True  # whether an export has it; else the value is that of a file without it
    ours: Callable[[Any], Any] = lambda value: value  # the setting for a value of theirs

    def found(self, path: pathlib.Path, entries: Mapping[str, Any]) -> Any:
        """The value in the entries of the file; raises ConfigError if they lack it."""
        found = entries.get(self.name)
        found = self.default if found is None else found
        if found is None and found != self.value:
            raise ConfigError(f"config.init_from: {path}: has no {self.name}")
        return found


_PLAIN = tuple(Field(name, None, written=False) for name in _OTHERWISE)


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """An architecture of transformers that computes the same logits."""

    architecture: str  # the class of theirs
    differences: tuple[str, ...]  # settings of ours that it has not, each as "model.x: is A, but must be B"
    # By name, the entries of their files that say what is computed; the first file must be there
    files: dict[str, tuple[Field, ...]]
    more: dict[str, dict[str, Any]]  # by the file's name, entries that change no logits
    table: Table  # the tensors

    def entries(self, name: str) -> dict[str, Any]:
        """The entries of the file of this name."""
        written = {field.name: field.value for field in self.files[name] if field.written}
        return {**written, **self.more[name]}

    def check(self, folder: pathlib.Path) -> None:
        """Raises ConfigError, which names the setting, if the files in `folder` are not of this model."""
        if self.differences:
            raise ConfigError(f"config.{'; '.join(self.differences)}")
        for name, fields in self.files.items():
            path = folder / name
            if name == CONFIG or path.exists():
                entries = read_entries(path)
                if name == CONFIG:
                    self._check_architecture(path, entries)
                    _check_fields(path, _PLAIN, entries)
                _check_fields(path, fields, entries)

    def _check_architecture(self, path: pathlib.Path, entries: Mapping[str, Any]) -> None:
        found = entries.get("architectures")
        if found != [self.architecture]:
            problem = f"is of {found}, but the settings under config.model are those of {self.architecture}"
            raise ConfigError(f"config.init_from: {path}: {problem}")


def needs(config: Any, of: str, **wanted: Any) -> tuple[str, ...]:
    """Settings that differ from those of the architecture `of`, each in a line."""
    return tuple(
        f"model.{name}: is {getattr(config, name)}, but must be {value}, as {of} has it"
        for name, value in wanted.items()
        if getattr(config, name) != value
    )


def settings_of(fields: Sequence[Field], path: pathlib.Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ours that the entries of the file stand for; raises ConfigError if one is missing."""
    return {f.setting: f.ours(f.found(path, entries)) for f in fields if f.setting is not None}


def read_entries(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a JSON file, where several places are known for one as in transformers 5."""
    try:
        entries = dict(json.loads(path.read_bytes()))  # bytes: also with a byte order mark
    except OSError as error:
        raise ConfigError(f"config.init_from: {path}: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"config.init_from: {path}: is no JSON object: {reason(error)}") from None
    experts = entries.get("num_local_experts")
    if experts is not None:
        entries["num_experts"] = experts
    return {**entries, **_rope(path, entries)}


def _rope(path: pathlib.Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Kind and base of the rotary positions: those of `rope_scaling` alone, if it has any, come first."""
    name = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    group = entries.get(name) or {}
    if not isinstance(group, dict):
        raise ConfigError(f"config.init_from: {path}: {name} is {group!r:.80}, but must be an object")
    if nested := [key for key, value in group.items() if isinstance(value, dict)]:
        problem = f"{name} has some for {nested[0]}, but only the same for all layers have a counterpart here"
        raise ConfigError(f"config.init_from: {path}: {problem}")
    theta = group.get("rope_theta", entries.get("rope_theta"))
    return {"rope_theta": theta, "rope_type": group.get("rope_type", group.get("type", "default"))}


def _check_fields(path: pathlib.Path, fields: Sequence[Field], entries: Mapping[str, Any]) -> None:
    differ = []
    for field in fields:
        found = field.found(path, entries)
        if found == field.value:
            continue
        if field.setting is None:
            problem = f"{field.name} is {found!r:.80}, but only {field.value!r} has a counterpart here"
            raise ConfigError(f"config.init_from: {path}: {problem}")
        given = f"gives a {field.name} of {field.value!r}"
        differ.append(f"model.{field.setting}: {given}, but must give {found!r}")
    if differ:
        raise ConfigError(f"config.{'; '.join(differ)}, as {path} has it")


Shape = tuple[int, ...]


class Theirs(NamedTuple):
    """A tensor of theirs: its shape, and how it is made from one of ours; where there is none, it is zero."""

    shape: Shape
    ours: str | None = None
    make: Callable[[np.ndarray], np.ndarray] = np.asarray


class Ours(NamedTuple):
    """The construction of one of our tensors from some of theirs."""

    theirs: tuple[str, ...]
    make: Callable[..., np.ndarray]


class Table:
    """Every tensor of a model by its name, ours by layer; the functions take and give float32 arrays.

    Attributes:
      theirs: what a file of theirs has.
      ours: every parameter of ours.
      ignored: tensors that a file of theirs may have beside, which change no logits.
      copies: tensors that a file of theirs may have once more, by the name of the copy.
    """

    def __init__(self, shapes: Mapping[str, Shape], ignored: Sequence[str] = ()) -> None:
        """`shapes`: of all parameters of ours, by layer."""
        self.theirs: dict[str, Theirs] = {}
        self.ours: dict[str, Ours] = {}
        self.ignored = frozenset(ignored)
        self.copies: dict[str, str] = {}
        self._shapes = shapes

    def shape(self, ours: str) -> Shape:
        """Shape of one of our parameters."""
        return self._shapes[ours]

    def same(self, ours: str, theirs: str, shape: Shape | None = None, gain: float = 1.0) -> None:
        """The same numbers, in this shape if it is another, and theirs `gain` times as large."""
        their_shape = shape or self.shape(ours)
        self.theirs[theirs] = Theirs(their_shape, ours, lambda x: _times(x, gain).reshape(their_shape))
        self.ours[ours] = Ours((theirs,), lambda x: _times(x, 1 / gain).reshape(self.shape(ours)))

    def linear(self, ours: str, theirs: str, outputs: int = 1) -> None:
        """A kernel (inputs, outputs), its last `outputs` axes those of the output; theirs is (out, in)."""
        shape = self.shape(ours)
        flat = math.prod(shape[:-outputs]), math.prod(shape[-outputs:])
        self.theirs[theirs] = Theirs(flat[::-1], ours, lambda x: x.reshape(flat).T)
        self.ours[ours] = Ours((theirs,), lambda x: x.T.reshape(shape))

    def linears(self, ours: str, theirs: Sequence[str]) -> None:
        """Kernels (inputs, outputs) in the rows of one tensor of ours; theirs are (out, in), one by one."""
        _, inputs, outputs = self.shape(ours)
        for row, name in enumerate(theirs):
            self.theirs[name] = Theirs((outputs, inputs), ours, functools.partial(_kernel, row))
        self.ours[ours] = Ours(tuple(theirs), lambda *rows: np.stack([row.T for row in rows]))

    def zero(self, theirs: str, shape: Shape) -> None:
        """A tensor of theirs that changes no logits, which we do not have."""
        self.theirs[theirs] = Theirs(shape)


def _kernel(row: int, x: np.ndarray) -> np.ndarray:
    return x[row].T


def _times(x: np.ndarray, gain: float) -> np.ndarray:
    return x if gain == 1.0 else x * np.float32(gain)
