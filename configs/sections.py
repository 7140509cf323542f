"""ConfigDicts with every setting at its default, made from the dataclasses that say what each one means.

A config file begins with them and says what differs, and why. All settings of one, with value, meaning and
bounds: python -m experiments.train --config=FILE --settings
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from ddiloco.config import ConfigError


def section(cls: type) -> ConfigDict:
    """The settings of a dataclass; those that are None are placeholders of their type."""
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = section(hints[field.name])
        elif field.default is not dataclasses.MISSING:
            values[field.name] = _value(field.default, hints[field.name])
    return ConfigDict(values)


def model(name: str) -> ConfigDict:
    """The settings of this model of `ddiloco.models.MODELS`."""
    from ddiloco.models import MODELS  # here, since whoever needs other sections need not wait for JAX

    config = section(MODELS[name].config)
    config.name = name
    return config


def run(name: str) -> ConfigDict:
    """All settings of a run that trains this model."""
    from ddiloco.models import MODELS
    from ddiloco.settings.experiment import Experiment
    from ddiloco.tasks import task_class

    task = task_class(MODELS[name].task)
    config = section(Experiment)
    config.model = model(name)
    config.data = section(task.data_settings)
    if task.sample_settings is None:
        del config.sample
    else:
        config.sample = section(task.sample_settings)
    return config


def words(preset: str, *axes: Sequence[str]) -> list[str]:
    """The word of each axis that a preset, words with commas between, has; or its first.

    Raises:
      ConfigError: a word is of no axis, or two are of one.
    """
    names = preset.split(",")
    known = [name for axis in axes for name in axis]
    for name in names:
        if name not in known:
            raise ConfigError(f"no preset {name!r}; there are {', '.join(known)}")
    found = [[name for name in names if name in axis] or [axis[0]] for axis in axes]
    for of_axis in found:
        if len(of_axis) > 1:
            raise ConfigError(f"no preset {preset!r}: only one of {', '.join(of_axis)}")
    return [name for (name,) in found]


def _value(default: Any, hint: Any) -> Any:
    if default is None and isinstance(hint, types.UnionType):
        (kind,) = (option for option in typing.get_args(hint) if option is not type(None))
        return config_dict.placeholder(kind)
    return default
