"""The front of every program: flags and configs in, one-line errors and exit codes out."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import pathlib
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError

USAGE_ERROR = 2


_default: list[str] = []  # the config file of the program that runs, when none is given


class UsageError(Exception):
    """The command line asks for something impossible; the message is one line."""


def define_config(default: str) -> flags.FlagHolder:
    """The flag `--config=FILE.py[:PRESET]`, whose fields `--config.any.field=value` overrides.

    ml_collections reads the overrides here already, off the command line, and against this flag's default:
    so the default is the file that was asked for, and an unknown field ends the program here.
    """
    _default.append(default)
    sys.argv[1:] = _config_first(sys.argv[1:])
    try:
        _check_overrides(sys.argv)
    except UsageError as error:
        _fail(str(error))
    return config_flags.DEFINE_config_file(
        "config", _chosen_config(sys.argv), "Config file, and its preset after a colon."
    )


def take_overrides() -> list[tuple[str, str]]:
    """Takes every `--config.path=value` off the command line, for a program that hands them on.

    Returns the (path, value) of each, in their order; a bare `--config.path` has the value `true`.
    """
    arguments, taken, kept = sys.argv[1:], [], []
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not (argument.startswith("-") and name.startswith("config.")):
            kept.append(argument)
            continue
        if not equals:
            value = arguments.pop(0) if arguments and not arguments[0].startswith("--") else "true"
        taken.append((name.removeprefix("config."), value))
    sys.argv[1:] = kept
    return taken


def config_arguments() -> list[str]:
    """The config, with its overrides in their order, as the command line of a program like this one."""
    overrides = []
    for path, value in _overrides(sys.argv):
        bare = value is None or value.startswith("--")  # of a bool that is set by its name alone
        overrides.append(f"--config.{path}={'true' if bare else value}")
    return [f"--config={_chosen_config(sys.argv)}", *overrides]


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
            if nones:
                _set_nones(flags.FLAGS.config, nones)
            if len(argv) > 1 and not positional:
                raise UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
            sys.exit(main(argv) or 0)
        except KeyboardInterrupt:  # before the program had anything to save
            sys.exit(128 + signal.SIGINT)
        except (UsageError, ConfigError, DataError) as error:
            _fail(str(error))

    app.run(guarded, flags_parser=parse)


def load_module(path: str, flag: str) -> types.ModuleType:
    """The Python file that a flag names.

    Raises:
      UsageError: no such file.
    """
    if not pathlib.Path(path).is_file():
        raise UsageError(f"{flag}: {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"{flag}_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_config(argument: str) -> ConfigDict:
    """The ConfigDict that `FILE.py[:PRESET]` stands for.

    Raises:
      UsageError: no such file, or the file knows no such preset.
    """
    path, _, preset = argument.partition(":")
    module = load_module(path, "config")
    try:
        return module.get_config(preset) if preset else module.get_config()
    except ValueError as error:
        raise UsageError(f"config: {argument}: {error}") from None


def resolve(argument: str, overrides: Sequence[tuple[str, Any]]) -> ConfigDict:
    """The ConfigDict that a program given `--config=argument` and these (path, value) overrides has.

    Raises:
      UsageError: no such file, preset or field, or a value that the field cannot have.
    """
    _check_paths(load_config(argument), [path for path, _ in overrides])
    argv = ["", f"--config={argument}", *(f"--config.{path}={value}" for path, value in overrides)]
    kept, nones = _take_nones(argv)
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_file("config", argument, "", flag_values=values, sys_argv=kept)
        values(kept)
    except flags.Error as error:
        raise UsageError(str(error).splitlines()[0].removeprefix("flag --")) from None
    _set_nones(values.config, nones)
    return values.config


def tell(line: str) -> None:
    """A line for whoever looks on; results are printed."""
    print(line, file=sys.stderr, flush=True)


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


def _config_first(arguments: Sequence[str]) -> list[str]:
    """The arguments in an order that ml_collections takes: the config file before what overrides it."""
    files, others = [], []
    waiting = iter(arguments)
    for argument in waiting:
        if argument in ("--config", "-config"):
            files += [argument, *itertools.islice(waiting, 1)]
        else:
            (files if argument.startswith(("--config=", "-config=")) else others).append(argument)
    return [*files, *others]


def _chosen_config(argv: Sequence[str]) -> str:
    """The config file, and its preset, that the command line asks for last; else the program's own."""
    given = list(_default)
    for i, argument in enumerate(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "config" and (equals or i + 1 < len(argv)):
            given.append(value if equals else argv[i + 1])
    return given[-1]


def _check_overrides(argv: Sequence[str]) -> None:
    if _default:
        _check_paths(load_config(_chosen_config(argv)), [path for path, _ in _overrides(argv)])


def _check_paths(config: ConfigDict, paths: Sequence[str]) -> None:
    for path in paths:
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
    kept, nones, taken = [], [], False
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        override = argument.startswith("-") and name.startswith("config.")
        if taken:  # the value of the argument before
            taken = False
        elif override and (value if equals else following) in ("None", "none"):
            nones.append(name.removeprefix("config."))
            taken = not equals
        else:
            kept.append(argument)
    return kept, nones


def _set_nones(config: ConfigDict, paths: Sequence[str]) -> None:
    for path in paths:
        *groups, name = path.split(".")
        at = config
        for group in groups:
            at = at[group]
        with at.ignore_type():
            at[name] = None
