"""A launcher's plan: files to write, and commands to run beside them."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import pathlib
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class LaunchedRun:
    """A run on some engine."""

    name: str  # of the run, in lower case letters, digits and dashes
    config: Sequence[str]  # its settings as program arguments, `--config=FILE` first
    learners: int  # maximum; the engine starts each when it has resources
    processes: int = 1  # of each learner, one a host
    grace: float = 25.0  # seconds that a process gets between the order to stop and its end
    port: int = 7070  # at which the syncer listens; learners answer each other at the next one
    shards: int = 1  # processes of the syncer

    @property
    def settings(self) -> list[str]:
        """`config`, and the hosts of learners that have several, so that the syncer expects their calls."""
        if self.processes == 1:
            return [*self.config]
        return [*self.config, f"--config.remote.hosts={f'{self.processes},' * self.learners}"]

    @property
    def donor_port(self) -> int:
        """Port at which a learner sends others its inner state."""
        return self.port + 1

    @property
    def coordinator_port(self) -> int:
        """Port of a learner's process 0; the next one is used too."""
        return self.port + 2

    @property
    def health_port(self) -> int:
        """Port at which every process answers probes."""
        return self.port + 10

    def shard_port(self, shard: int) -> int:
        """Port of a further shard of the syncer; the next one is for its probes."""
        return self.port + 10 + 2 * shard


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """Files by name, and commands that name them."""

    files: Mapping[str, str]
    commands: Sequence[Sequence[str]]

    def write(self, folder: pathlib.Path) -> None:
        """Writes the files; raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)

    def shown(self) -> str:
        """The commands quoted for a shell, one a line."""
        return "\n".join(map(shlex.join, self.commands))

    def carry_out(self, folder: pathlib.Path, run: Callable[..., int] = subprocess.call) -> int:
        """Runs the commands in the folder of the files; returns the first exit code that is not 0, else 0."""
        return next((code for command in self.commands if (code := run(command, cwd=folder))), 0)


def filled(template: str, **values: Any) -> str:
    """A file of `templates/` with these values; the filter `quoted` writes a string for YAML and JSON."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (_TEMPLATES / name).read_text()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "quoted": lambda text: json.dumps(text, ensure_ascii=False),
        "gib": lambda size: f"{math.ceil(size / GIB)}Gi",
        "shell": shlex.quote,
        "words": shlex.join,
    }
    return made.get_template(template).render(**values)


_TEMPLATES = importlib.resources.files("ddiloco.launch") / "templates"
