"""A model's counterpart in transformers: the entries of its files, its tensors, and the differences."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.config import ConfigError
from ddiloco.telemetry.records import reason
from ddiloco.weights.table import Table

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
                entries = _read(path)
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


def _read(path: pathlib.Path) -> dict[str, Any]:
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
        found = entries.get(field.name)
        found = field.default if found is None else found
        if found == field.value:
            continue
        if field.setting is None:
            problem = f"{field.name} is {found!r:.80}, but only {field.value!r} has a counterpart here"
            raise ConfigError(f"config.init_from: {path}: {problem}")
        if found is None:
            raise ConfigError(f"config.init_from: {path}: has no {field.name}")
        given = f"gives a {field.name} of {field.value!r}"
        differ.append(f"model.{field.setting}: {given}, but must give {found!r}")
    if differ:
        raise ConfigError(f"config.{'; '.join(differ)}, as {path} has it")
