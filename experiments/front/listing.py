"""All settings of a run as text: path, value, meaning, and what else the value may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddiloco.config import allowed
from ddiloco.settings.experiment import Experiment, all_settings


def listing(experiment: Experiment) -> str:
    """One line for each setting, in columns."""
    rows = [(leaf.path, _shown(leaf.value), _meaning(leaf.metadata)) for leaf in all_settings(experiment)]
    path, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:<{path}}  {row[1]:<{value}}  {row[2]}" for row in rows)


def _shown(value: Any) -> str:
    """The value as the command line takes it."""
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _meaning(metadata: Mapping[str, Any]) -> str:
    bounds = allowed(metadata)
    stays = "; stays when a run resumes" if metadata["may_change"] == "never" else ""
    return f"{metadata['meaning']}{f' [{bounds}]' if bounds else ''}{stays}"
