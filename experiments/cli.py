"""The front of every program: flags and configs in, one-line errors and exit codes out."""

from __future__ import annotations

import difflib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError

USAGE_ERROR = 2


_default: list[str] = []  # the config file of the program that runs, when none is given


class UsageError(Exception):
    """The command line asks for something impossible; the message is one line."""


def define_config(default: str) -> flags.FlagHolder:
    """The flag `--config=FILE.py[:PRESET]`, whose fields `--config.any.field=value` overrides."""
    _default.append(default)
    return config_flags.DEFINE_config_file("config", default, "Config file, and its preset after a colon.")


def run(main: Callable[[Sequence[str]], int | None], positional: bool = False) -> None:
    """Parses the flags and runs `main`; exits 0, or as `main` says, 2 on a usage error, 1 on any other."""
    nones: list[str] = []

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            kept, found = _take_nones(argv)
            nones.extend(found)
            _check_overrides(argv)
            return flags.FLAGS(kept, known_only=False)
        except (flags.Error, UsageError, ConfigError) as error:
            _fail(str(error).splitlines()[0].removeprefix("flag --"))

    def guarded(argv: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            _set_nones(nones)
            if len(argv) > 1 and not positional:
                raise UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
            sys.exit(main(argv) or 0)
        except (UsageError, ConfigError, DataError) as error:
            _fail(str(error))

    app.run(guarded, flags_parser=parse)


def load_config(argument: str) -> ConfigDict:
    """The ConfigDict that `FILE.py[:PRESET]` stands for.

    Raises:
      UsageError: no such file, or the file knows no such preset.
    """
    path, _, preset = argument.partition(":")
    if not pathlib.Path(path).is_file():
        raise UsageError(f"config: {path}: no such file")
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.get_config(preset) if preset else module.get_config()
    except ValueError as error:
        raise UsageError(f"config: {argument}: {error}") from None


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _overrides(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """The (path, value) of every `--config.path=value` or `--config.path value`."""
    found = []
    for i, argument in enumerate(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name.startswith("config."):
            following = argv[i + 1] if i + 1 < len(argv) else None
            found.append((name.removeprefix("config."), value if equals else following))
    return found


def _check_overrides(argv: Sequence[str]) -> None:
    if not _default:
        return
    given = [a.partition("=")[2] for a in argv if a.lstrip("-").startswith("config=")]
    spaced = [argv[i + 1] for i, a in enumerate(argv[:-1]) if a in ("--config", "-config")]
    config = load_config((given + spaced or _default)[-1])
    for path, _ in _overrides(argv):
        at = config
        for i, part in enumerate(path.split(".")):
            part = part.partition("[")[0]
            if not isinstance(at, ConfigDict) or part not in at:
                known = list(at) if isinstance(at, ConfigDict) else []
                close = difflib.get_close_matches(part, known, n=1)
                hint = (
                    f"did you mean {close[0]}?"
                    if close
                    else f"known: {', '.join(sorted(known)) or 'nothing'}"
                )
                where = ".".join(["config", *path.split(".")[:i], part])
                raise UsageError(f"{where}: no such setting; {hint}")
            at = at.get_ref(part).get() if part in at else None


def _take_nones(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--config.path=None` out: the flags of ml_collections cannot set a number to None."""
    nones = [path for path, value in _overrides(argv) if value in ("None", "none")]
    texts = {f"--config.{path}={value}" for path in nones for value in ("None", "none")}
    return [argument for argument in argv if argument not in texts], nones


def _set_nones(paths: Sequence[str]) -> None:
    for path in paths:
        *groups, name = path.split(".")
        at = flags.FLAGS.config
        for group in groups:
            at = at[group]
        with at.ignore_type():
            at[name] = None
