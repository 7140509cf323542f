"""What the programs share: config flags with fitting defaults, one-line errors, exit codes."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import inspect
import pathlib
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.observe import terminal

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
    read = list(_read(sys.argv[1:]))
    read.sort(key=lambda argument: argument.name != "config")  # the file before what overrides it
    sys.argv[1:] = [word for argument in read for word in argument.words]
    try:
        _check_overrides(sys.argv)
    except UsageError as error:
        _fail(str(error))
    return config_flags.DEFINE_config_file(
        "config", chosen_config(), "Config file, and its preset after a colon."
    )


def take_overrides(group: str = "config") -> list[tuple[str, str]]:
    """Takes every `--config.path=value` (or that of another group) off the command line.

    Returns the (path, value) of each, in their order; a bare `--config.path` has the value `true`.
    """
    read = list(_read(sys.argv[1:], group))
    sys.argv[1:] = [word for argument in read if argument.path is None for word in argument.words]
    return [(argument.path, argument.text) for argument in read if argument.path is not None]


def chosen_config() -> str:
    """The config file, and its preset, that the command line asks for last; else the program's own."""
    given = [argument.value for argument in _read(sys.argv[1:]) if argument.name == "config"]
    return [*_default, *filter(None, given)][-1]


def config_arguments() -> list[str]:
    """The config, with its overrides in their order, as the command line of a program like this one."""
    overrides = [a for a in _read(sys.argv[1:]) if a.path is not None]
    return [f"--config={chosen_config()}", *(f"--config.{a.path}={a.text}" for a in overrides)]


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
            _check_folders()
            if len(argv) > 1 and not positional:
                raise UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
            sys.exit(main(argv) or 0)
        except KeyboardInterrupt:  # before the program had anything to save
            sys.exit(128 + signal.SIGINT)
        except (UsageError, ConfigError, DataError) as error:
            _fail(str(error))

    app.run(guarded, flags_parser=parse)


def load_module(path: str, flag: str) -> types.ModuleType:
    """The Python file that a flag names; raises UsageError if there is no such file."""
    if not pathlib.Path(path).is_file():
        raise UsageError(f"{flag}: {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"{flag}_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(argument: str, function: str, flag: str) -> Any:
    """What the function of `FILE.py[:ARGUMENT]` returns, given what stands after the colon.

    Raises:
      UsageError: no such file or function, or the function takes no argument or not this one.
    """
    path, _, given = argument.partition(":")
    called = getattr(load_module(path, flag), function, None)
    if called is None:
        raise UsageError(f"{flag}: {path}: has no {function}()")
    if given and not inspect.signature(called).parameters:
        raise UsageError(f"{flag}: {argument}: its {function}() takes no argument")
    try:
        return called(given) if given else called()
    except ValueError as error:
        raise UsageError(f"{flag}: {argument}: {error}") from None


def load_config(argument: str) -> ConfigDict:
    """The ConfigDict that `FILE.py[:PRESET]` stands for; raises UsageError if there is none."""
    return call(argument, "get_config", "config")


def literal(text: str) -> Any:
    """The Python value that the text spells, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextlib.contextmanager
def reaching(flag: str, path: pathlib.Path) -> Iterator[None]:
    """What the system refuses in the `with` block is a usage error of the flag that named the path."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror}") from None


def made_folder(flag: str, path: str | pathlib.Path) -> pathlib.Path:
    """The folder that a flag names, made where it was not there; raises UsageError."""
    folder = pathlib.Path(path)
    with reaching(flag, folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    """Writes a line to standard error, for whoever looks on, if it is read; results go to standard output."""
    terminal.tell(terminal.printable(line), sys.stderr)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


class _Argument(NamedTuple):
    """A flag of the command line with its value, or a word that is none of the config's."""

    words: list[str]  # one, or a flag and its value apart
    name: str | None = None  # "config", or "config.any.field"
    value: str | None = None  # None: a flag without one

    @property
    def path(self) -> str | None:
        """The field that is overridden; None: the argument overrides none."""
        return self.name.partition(".")[2] or None if self.name else None

    @property
    def text(self) -> str:
        """The value; a bool is set by its name alone."""
        return "true" if self.value is None else self.value


def _read(arguments: Sequence[str], group: str = "config") -> Iterator[_Argument]:
    """The arguments one by one, those of the group understood."""
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name.partition(".")[0] != group:
            yield _Argument([word])
        elif equals:
            yield _Argument([word], name, value)
        elif waiting and not waiting[0].startswith("--"):
            yield _Argument([word, waiting[0]], name, waiting.pop(0))
        else:
            yield _Argument([word], name)


def _check_folders() -> None:
    """A run's folder is on a disk: a file in a bucket is neither locked nor written to again."""
    for flag in ("workdir", "output", "kept"):
        given = flags.FLAGS[flag].value if flag in flags.FLAGS else None
        for path in [given] if isinstance(given, str) else given or []:
            if "://" in path:
                raise UsageError(f"{flag}: {path}: must be on a disk with file locks, which no bucket has")


def _check_overrides(argv: Sequence[str]) -> None:
    if _default:
        paths = [argument.path for argument in _read(argv[1:]) if argument.path is not None]
        _check_paths(load_config(chosen_config()), paths)


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
    read = list(_read(argv))
    nones = [a for a in read if a.path is not None and a.value in ("None", "none")]
    kept = [word for argument in read if argument not in nones for word in argument.words]
    return kept, [argument.path for argument in nones]


def _set_nones(config: ConfigDict, paths: Sequence[str]) -> None:
    for path in paths:
        *groups, name = path.split(".")
        at = config
        for group in groups:
            at = at[group]
        with at.ignore_type():
            at[name] = None
