"""All settings of a run as text: path, value, meaning, and what else the value may be."""

from __future__ import annotations

from ddiloco.config import allowed
from ddiloco.settings.experiment import Experiment, all_settings


def listing(experiment: Experiment) -> str:
    """One line for each setting, in columns."""
    rows = []
    for leaf in all_settings(experiment):
        value = tuple(leaf.value) if isinstance(leaf.value, list) else leaf.value  # as command lines have it
        bounds = allowed(leaf.metadata)
        stays = "; stays when a run resumes" if leaf.metadata["may_change"] == "never" else ""
        meaning = f"{leaf.metadata['meaning']}{f' [{bounds}]' if bounds else ''}{stays}"
        rows.append((leaf.path, str(value), meaning))
    path, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:<{path}}  {row[1]:<{value}}  {row[2]}" for row in rows)
