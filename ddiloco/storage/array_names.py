"""The names of the arrays in a learner's state: `params/<name>`, `inner/0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def named(kind: str, arrays: Mapping[str, T] | Sequence[T]) -> dict[str, T]:
    """The arrays as `<kind>/<name>`, or as `<kind>/<i>` from 0; for a fragment p, `kind` ends in `/<p>`."""
    pairs = arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays)
    return {f"{kind}/{name}": array for name, array in pairs}


def is_kind(kind: str, name: str) -> bool:
    """Whether an array of this name is of the kind."""
    return name.startswith(f"{kind}/")


def of_kind(kind: str, arrays: Mapping[str, T]) -> dict[str, T]:
    """The arrays of one kind by name, as `named` took them; empty if there are none."""
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def numbered(kind: str, arrays: Mapping[str, T]) -> tuple[T, ...]:
    """The arrays of one kind in order, as `named` took them; empty if there are none."""
    return tuple(x for _, x in sorted(of_kind(kind, arrays).items(), key=lambda item: int(item[0])))
