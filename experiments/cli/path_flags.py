"""Flags that name files and folders."""

from __future__ import annotations

import os

from absl import flags

from ddiloco.config import ConfigError

_ON_DISKS = ("workdir", "output", "kept")
_PATHS = (*_ON_DISKS, "checkpoint", "compare", "save", "sweep", "table", "tls", "to", "token_file", "trace")


def read(known: flags.FlagValues) -> None:
    """Puts the home folder in the place of `~`, which shells leave in --flag=~/folder.

    Raises:
      ConfigError: a run's folder is in a bucket, where files are neither locked nor written to again.
    """
    for flag in (known[name] for name in _PATHS if name in known):
        many = isinstance(flag.value, list)
        given = flag.value if many else [flag.value]
        paths = [os.path.expanduser(path) for path in given if isinstance(path, str)]  # some --to is a step
        if paths:
            flag.value = paths if many else paths[0]
        for path in paths if flag.name in _ON_DISKS else []:
            if "://" in path:
                raise ConfigError(
                    f"{flag.name}: {path}: must be on a disk with file locks, which no bucket has"
                )
