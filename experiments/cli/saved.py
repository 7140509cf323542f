"""A config out of JSON, such as a run's config.json: `--config=experiments/cli/saved.py:config.json`."""

import json
import pathlib

from ml_collections import ConfigDict

from ddiloco.config import ConfigError


def get_config(file: str) -> ConfigDict:
    """The settings in the file."""
    try:
        return ConfigDict(json.loads(pathlib.Path(file).read_text()))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is no JSON: {error}") from None
