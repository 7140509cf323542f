"""Settings: frozen dataclasses, built and checked once from the mapping of a config file.

Any dataclass works: meaning, bounds and marks stand in each field's metadata (written by `setting`, or by
hand where a package imports the standard library only), rules that join several fields in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

REFUSED = 2
"""Exit code of a process with a setting that is wrong, or that the syncer refuses: it would end so again."""

CORRUPT = 3
"""Exit code of a learner whose devices compute wrong."""

HUNG = 124
"""Exit code of a learner a step of which hangs."""

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting has a value that it may not have; the message is one line and names the field."""


class Marks(TypedDict, total=False):
    """When a setting may change; one without a mark has that of its group (`section`)."""

    # "process": no number of a run follows from it, so that each process may have its own; "resume": a run
    # may resume with another; "never": it stays
    may_change: Literal["process", "resume", "never"]
    because: str  # the reason, for the error
    both_ends: bool  # learners and syncer must have the same, unless each process may have its own


_UNMARKED = Marks(may_change="never", because="it is not known to be sound to change", both_ends=False)


class Leaf(NamedTuple):
    """One setting: its dotted path, value, the arguments of its `setting`, and the marks of its groups."""

    path: str
    value: Any
    metadata: Mapping[str, Any]


def setting(
    default: Any,
    meaning: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | None = None,
    **marks: Unpack[Marks],
) -> Any:
    """A dataclass field with its meaning (and unit) and the values that it may take.

    Bounds on a tuple field hold for each of its items. `None` is exempt where the type allows it.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below, "choices": choices}
    told = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"meaning": meaning, **told, **marks})


def section(cls: type[T], **marks: Unpack[Marks]) -> T:
    """A dataclass field that is itself a group of settings, by default all at their defaults."""
    return dataclasses.field(default_factory=cls, metadata=marks)


def leaves(settings: Any, prefix: str = "", around: Mapping[str, Any] = _UNMARKED) -> Iterator[Leaf]:
    """Every setting in a tree of them; `around` are the marks of the groups that it is in."""
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), prefix + field.name
        marks = {mark: field.metadata.get(mark, around[mark]) for mark in _UNMARKED}
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.", marks)
        else:
            yield Leaf(path, _plain(value), {**field.metadata, **marks})


def suggestion(name: str, known: Iterable[str]) -> str:
    """What ends the error about an unknown name: the nearest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'nothing'}"


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "config") -> T:
    """Makes a dataclass from nested mappings (a ConfigDict or parsed JSON), checking every field.

    Raises:
      ConfigError: an unknown or missing field, a value of another type, or one outside its bounds.
    """
    if not hasattr(values, "items"):
        raise ConfigError(f"{prefix}: is {values!r}, but is a group of settings")
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"{prefix}.{name}: no such setting; {suggestion(name, known)}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, field in known.items():
        if name in values:
            arguments[name] = _checked(values[name], hints[name], field.metadata, f"{prefix}.{name}")
        elif field.default is field.default_factory:  # it has neither
            raise ConfigError(f"{prefix}.{name}: is missing")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}.{error}") from None


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested dicts of JSON values; `build` of the result gives equal settings."""
    return {
        field.name: to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
        for field in dataclasses.fields(settings)
        for value in [getattr(settings, field.name)]
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted paths."""
    found = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], name: str) -> Any:
    value = _typed(value, hint, name)
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None:
            _check_bounds(item, metadata, name)
    return value


def _typed(value: Any, hint: Any, name: str) -> Any:
    if hint is Any:
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        one, *several = (option for option in typing.get_args(hint) if option is not type(None))
        if several and isinstance(value, str) and "," in value:  # as a command line has it
            value = [item.strip() for item in value.split(",")]
        hint = several[0] if several and isinstance(value, list | tuple) else one
    if dataclasses.is_dataclass(hint):
        return build(hint, value, name)  # type: ignore[arg-type]
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: is {value!r}, but must be a sequence")
        hints = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(value) != len(hints):
            raise ConfigError(f"{name}: is {value!r}, but must have {len(hints)} entries")
        return tuple(_typed(item, hint, name) for item, hint in zip(value, hints, strict=True))
    if kind in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: is {value!r}, but must be a mapping")
        return {_key(key, inner[0], name): _typed(item, inner[1], name) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: is {value!r}, but must be of type {hint.__name__}")
    return value


def _key(key: Any, hint: Any, name: str) -> Any:
    """The key of a mapping, which JSON makes text of a number."""
    return _typed(int(key) if hint is int and isinstance(key, str) and key.isdecimal() else key, hint, name)


_RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least"),
    "at_most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def allowed(metadata: Mapping[str, Any]) -> str:
    """The values that a setting may take, as "at least 1 and below 2"; empty: all of its type."""
    if "choices" in metadata:
        return f"one of {', '.join(map(str, metadata['choices']))}"
    return " and ".join(f"{told} {metadata[rule]}" for rule, (_, told) in _RULES.items() if rule in metadata)


def _check_bounds(value: Any, metadata: Mapping[str, Any], name: str) -> None:
    if "choices" in metadata:
        if value not in metadata["choices"]:
            raise ConfigError(f"{name}: is {value!r}, but must be {allowed(metadata)}")
        return
    # `not all` so that NaN fails too.
    if not all(holds(value, metadata[rule]) for rule, (holds, _) in _RULES.items() if rule in metadata):
        raise ConfigError(f"{name}: is {value}, but must be {allowed(metadata)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: is {value}, but must be finite")
