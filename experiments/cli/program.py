"""What the programs share: config flags with fitting defaults, one-line errors, exit codes."""

from __future__ import annotations

import ast
import atexit
import contextlib
import difflib
import errno
import functools
import importlib.util
import inspect
import math
import os
import pathlib
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging
from ml_collections import ConfigDict

from ddiloco.config import REFUSED, ConfigError, suggestion
from ddiloco.data.errors import DataError
from ddiloco.settings import removed
from ddiloco.storage.workdir import check_folder, make_folder
from ddiloco.telemetry import terminal
from experiments.cli import streams

if TYPE_CHECKING:
    from ddiloco.settings.experiment import Experiment

LAST_SECONDS = 30.0  # for threads to end once a program is done

_default: list[str] = []  # the config file of the program that runs, when none is given
_given: list[tuple[str, str]] = []  # the overrides of its config
_FOLDERS = {"workdir": ("checkpoint", "output"), "output": ("to", "workdir")}  # what some call theirs
_ON_DISKS = ("workdir", "output", "kept")
_PATHS = (*_ON_DISKS, "checkpoint", "compare", "save", "sweep", "table", "tls", "to", "token_file", "trace")
_WORDS = {"true": True, "false": False, "none": None}


class UsageError(Exception):
    """The command line asks for something impossible; the message is one line."""


class Interrupted(KeyboardInterrupt):
    """Another signal than that of Ctrl-C, with the same meaning."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Config:
    """The config that the command line asks for."""

    @functools.cached_property
    def value(self) -> ConfigDict:
        """Its settings; raises UsageError."""
        return resolve(chosen_config(), _given)

    def experiment(self, settings: Mapping[str, Any] | None = None, **more: Any) -> Experiment:
        """The run that it describes, with these settings, by their paths, in place of the file's.

        Raises:
          UsageError: the command line gives a setting that the run makes no use of, or another value of one
            of these.
          ConfigError: a setting is impossible.
        """
        from ddiloco.settings.experiment import parse, why_idle

        settings = {**(settings or {}), **more}
        experiment = parse(resolve(chosen_config(), [*_given, *settings.items()]))
        for path, text in dict(_given).items():
            if path in settings and _setting(self.value, path) != settings[path]:
                raise UsageError(f"config.{path}: is {text}, but is {settings[path]} in this program's runs")
            if (why := why_idle(experiment, path)) is not None:
                raise UsageError(f"config.{path}: has no use where {why}; leave it out")
        return experiment


def define_config(default: str) -> Config:
    """The flag `--config=FILE.py[:PRESET]`, whose fields `--config.any.field=value` overrides."""
    streams.open_closed()
    _default.append(default)
    try:
        sys.argv[:] = flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False)
    except flags.Error as error:  # of --flagfile
        _exit_with_error(str(error).removeprefix("ERROR:: "))
    _given.extend(take_overrides())
    flags.DEFINE_string("config", default, "Config file, and its preset after a colon.")
    return Config()


def take_overrides(group: str = "config") -> list[tuple[str, str]]:
    """Takes every `--config.path=value` (or that of another group) off the command line.

    Returns the (path, value) of each, in their order; of a bare `--config.path` the value is `true`, and of
    `--noconfig.path` it is `false`.
    """
    read = list(_read(sys.argv[1:], group))
    sys.argv[1:] = [argument for words, path, _ in read if not path for argument in words]
    return [(path, text) for _, path, text in read if path]


def has_override(path: str) -> bool:
    """Whether the command line gives this setting."""
    return path in dict(_given)


def chosen_config() -> str:
    """The config file, and its preset, that the command line asks for last; else the program's own."""
    given = [text for _, path, text in _read(sys.argv[1:]) if path == ""]
    return [*_default, *filter(None, given)][-1]


def config_arguments() -> list[str]:
    """The config, with its overrides in their order, as the command line of a program like this one."""
    return [f"--config={chosen_config()}", *(f"--config.{path}={text}" for path, text in _given)]


def refuse_flags(names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of these flags that the command line gives.

    `why`: what follows the flag's name; a flag's default, also one of the environment, is not refused.
    """
    for name in names:
        if flags.FLAGS[name].present:
            raise UsageError(f"{name}: {why}")


def required(flag: flags.FlagHolder) -> Any:
    """The flag's value; raises UsageError if the command line has none."""
    if flag.value in (None, "", []):
        raise UsageError(f"{flag.name}: is missing; give --{flag.name}=...")
    return flag.value


def run(
    main: Callable[[Sequence[str]], int | None],
    positional: bool = False,
    refused: Callable[[], int] = lambda: REFUSED,
) -> None:
    """Parses the flags and runs `main`; exits 0, or as `main` says, 2 on a usage error, 1 on any other.

    `refused`: the code of a usage error, once the flags are read.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv, known_only=False)
        except flags.UnrecognizedFlagError as error:
            _exit_with_error(_suggest(error.flagname) or str(error).splitlines()[0])
        except flags.Error as error:
            _exit_with_error(str(error).splitlines()[0].removeprefix("flag --"))

    def guarded(argv: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            _check_numbers()
            _expand_paths(flags.FLAGS)
            if len(argv) > 1 and not positional:
                raise UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
            _exit(main(argv) or 0)
        except Interrupted as error:
            sys.exit(128 + error.number)
        except KeyboardInterrupt:  # before the program had anything to save
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            if (line := one_line(error)) is None:
                raise
            message, code = line
            _exit_with_error(message, refused() if code == REFUSED else code)

    streams.protect()
    _list_in_help()
    app.run(guarded, flags_parser=parse)


def _list_in_help() -> None:
    """Has --help list the flags that programs share, not only those of the program's own module."""
    for module, shared in flags.FLAGS.flags_by_module_dict().items():
        for flag in shared if module.startswith(__package__) else ():
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def one_line(error: Exception) -> tuple[str, int] | None:
    """What is shown of an error, and the exit code; None: of a mistake in the code, which has a traceback."""
    if isinstance(error, UsageError | ConfigError | DataError):
        return str(error), REFUSED
    if "jax" not in sys.modules:
        return None
    from experiments.cli import devices

    missing = devices.cause(error)
    return None if missing is None else (str(missing), REFUSED if isinstance(missing, ConfigError) else 1)


def installed_file(name: str) -> pathlib.Path:
    """What `dense` or `configs/dense.py` stands for in the installed `configs`; it need not be there."""
    name = name.removeprefix("configs/").removesuffix(".py")
    return pathlib.Path(importlib.util.find_spec("configs").origin).parent / f"{name}.py"


def load_module(path: str, flag: str) -> types.ModuleType:
    """The Python file that a flag names, else one of `configs`.

    Raises:
      UsageError: there is none, or it is of another kind.
    """
    file = pathlib.Path(path)
    if not file.is_file() and not (file := installed_file(path)).is_file():
        beside = [*pathlib.Path(path).parent.glob("*.py"), *file.parent.glob("*.py")]
        near = difflib.get_close_matches(pathlib.Path(path).stem, [each.stem for each in beside], n=1)
        hint = f"; did you mean {pathlib.Path(path).with_stem(near[0])}?" if near else ""
        raise UsageError(f"{flag}: {path}: no such file{hint}")
    spec = importlib.util.spec_from_file_location(f"{flag}_file", file)
    if spec is None:
        raise UsageError(f"{flag}: {path}: is no Python file, which ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for the types of its fields
    spec.loader.exec_module(module)
    return module


def load_and_call(argument: str, function: str, flag: str) -> Any:
    """What the function of `FILE.py[:ARGUMENT]` returns, given what stands after the colon.

    Raises:
      UsageError: no such file or function, or the function takes no argument or not this one, of which it
        raises a ConfigError. Any other error is a mistake in the file, and passes.
    """
    path, _, given = argument.partition(":")
    called = getattr(load_module(path, flag), function, None)
    if called is None:
        raise UsageError(f"{flag}: {path}: has no {function}()")
    parameters = inspect.signature(called).parameters.values()
    if given and not parameters:
        raise UsageError(f"{flag}: {argument}: its {function}() takes no argument")
    if not given and any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise UsageError(f"{flag}: {path}: its {function}() needs an argument, as in {path}:ARGUMENT")
    try:
        return called(given) if given else called()
    except ConfigError as error:
        raise UsageError(f"{flag}: {argument}: {error}") from None


def load_config(argument: str) -> ConfigDict:
    """The ConfigDict that `FILE.py[:PRESET]` stands for; raises UsageError if there is none."""
    return load_and_call(argument, "get_config", "config")


def parse_literal(text: str) -> Any:
    """The Python value that the text spells, also in a flag's way, or else the text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextlib.contextmanager
def os_errors_as_usage(flag: str, path: pathlib.Path) -> Iterator[None]:
    """What the system refuses in the `with` block is a usage error of the flag that named the path."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror or error}") from None


def writable_folder(flag: str, path: str | pathlib.Path) -> pathlib.Path:
    """The folder that a flag names, which can be made and written to; raises UsageError."""
    folder = pathlib.Path(path)
    with os_errors_as_usage(flag, folder):
        check_folder(folder)
    return folder


def ensure_folder(flag: str, path: str | pathlib.Path) -> pathlib.Path:
    """The folder that a flag names, made where it was not there; raises UsageError."""
    folder = pathlib.Path(path)
    with os_errors_as_usage(flag, folder):
        return make_folder(folder)


def writable_file(flag: flags.FlagHolder) -> pathlib.Path | None:
    """The file that a flag names, in a folder that is there now; None: it names none.

    Raises:
      UsageError: it cannot be written, which is found out before anything is made for it.
    """
    if not flag.value:
        return None
    path = pathlib.Path(flag.value)
    with os_errors_as_usage(flag.name, path):
        make_folder(path.parent)
        written = path.resolve()  # of a link, the file that it leads to
        new = not written.exists()
        written.open("a").close()
        if new:
            written.unlink()
    return path


def resolve(argument: str, overrides: Sequence[tuple[str, Any]]) -> ConfigDict:
    """The ConfigDict that a program given `--config=argument` and these (path, value) overrides has.

    Raises:
      UsageError: no such file, preset or field, or a value that the field cannot have.
    """
    config = load_config(argument)
    for path, value in overrides:
        _override(config, path, str(value))
    return config


def with_overrides(settings: Any, overrides: Sequence[tuple[str, str]], group: str) -> Any:
    """The settings of `config.GROUP` with these overrides.

    Raises:
      UsageError: an override is of another group.
      ConfigError: a value is impossible.
    """
    from ddiloco.config import build, to_dict

    changes = {}
    for path, text in overrides:
        first, _, name = path.partition(".")
        if first != group:
            raise UsageError(f"config.{path}: only settings of config.{group} can be another")
        changes[name] = parse_literal(text)
    return build(type(settings), {**to_dict(settings), **changes}, f"config.{group}")


def print_err(line: str) -> None:
    """Writes a line to standard error, if that is read; results go to standard output."""
    terminal.print_line(terminal.printable(line), sys.stderr)


def _suggest(flag: str) -> str | None:
    """The hint for an unknown flag that is a setting without the prefix `config`."""
    from ddiloco.settings.experiment import Experiment

    for other in _FOLDERS.get(flag, ()):
        if other in flags.FLAGS and "string" in flags.FLAGS[other].flag_type():
            return f"{flag}: no such flag; give --{other}"
    if "config" in flags.FLAGS and flag.partition(".")[0] in Experiment.__dataclass_fields__:
        return f"{flag}: no such flag; did you mean --config.{flag}?"
    if "config" in flags.FLAGS:
        with contextlib.suppress(UsageError):
            groups = load_config(chosen_config()).items()
            paths = [
                f"{name}.{flag}" for name, group in groups if isinstance(group, ConfigDict) and flag in group
            ]
            if paths:
                return f"{flag}: no such flag; did you mean --config.{' or --config.'.join(paths)}?"
    return None


def _exit(code: int) -> None:
    """Exits, also where a disk or a device holds threads for which Python would wait without end."""
    sys.stdout.flush()
    if code == 0 and (lost := streams.failure()) is not None:
        code = 1
        if lost.errno == errno.EPIPE:  # as of a program that is killed by it: its reader has had enough
            code = 128 + signal.SIGPIPE
        else:
            print(f"error: standard output: {lost.strerror}", file=sys.stderr)
    hung = threading.Timer(LAST_SECONDS, os._exit, (code,))
    hung.daemon = True
    hung.start()
    atexit.register(hung.cancel)  # threads have ended by then; hosts of a learner wait for each other as long
    sys.exit(code)


def _exit_with_error(message: str, code: int = REFUSED) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _read(arguments: Sequence[str], group: str = "config") -> Iterator[tuple[list[str], str | None, str]]:
    """The arguments one by one: words, which field of the group they override, and the value's text.

    The field is "" for the flag of the group itself, None for what is not the group's. A bool is set by its
    name alone, and unset by it with `no` before.
    """
    waiting = list(arguments)
    while waiting:
        words = [waiting.pop(0)]
        name, equals, value = words[0].lstrip("-").partition("=")
        if not words[0].startswith("-") or not re.match(rf"{group}(\.|$)|no{group}\.", name):
            yield words, None, ""
            continue
        if not equals and waiting and not waiting[0].startswith("--") and name.startswith(group):
            value = waiting.pop(0)
            words.append(value)
        elif not equals and name != group:
            value = "false" if name.startswith("no") else "true"
        yield words, name.partition(".")[2], value


def _check_numbers() -> None:
    """No flag is nan or infinite: the bounds of absl's let both pass."""
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name}: is {value}, but must be a finite number")


def _expand_paths(known: flags.FlagValues) -> None:
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


def _setting(config: ConfigDict, path: str) -> Any:
    return functools.reduce(lambda group, name: group[name], path.split("."), config)


def _override(config: ConfigDict, path: str, text: str) -> None:
    """Sets the field that the path names to what the text says, by the field's type."""
    group, value, parts = config, config, path.split(".")
    for i, part in enumerate(parts):
        if parts[:i] == ["model", "settings"] and part not in value:
            value[part] = parse_literal(text)  # of a loop: its function checks them
        if not isinstance(value, ConfigDict) or part not in value:
            if refused := removed.refusal(path):
                raise UsageError(refused)
            known = list(value) if isinstance(value, ConfigDict) else []
            wrong = ".".join(["config", *parts[: i + 1]])
            raise UsageError(f"{wrong}: no such setting; {suggestion(part, known)}")
        group, value = value, value[part]
    if isinstance(value, ConfigDict):
        raise UsageError(f"config.{path}={text}: is a group of settings, which are set one by one")
    kind = group.get_type(parts[-1])
    parser = _PARSERS.get(kind)
    none = text == "None" or (text == "none" and kind is not str)  # some texts may be "none"
    try:
        found = None if none else parser(text) if parser else parse_literal(text)
    except ValueError:
        raise UsageError(f"config.{path}: is {text!r}, but must be of type {kind.__name__}") from None
    with group.ignore_type():
        group[parts[-1]] = found


def _tuple(text: str) -> tuple[Any, ...]:
    """`(1, 2)`, `1,2`, one value alone, or words with commas between them."""
    value = parse_literal(text)
    if value == text:
        value = tuple(parse_literal(item.strip()) for item in text.split(","))
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: flags.BooleanParser().parse,
    int: flags.IntegerParser().parse,
    float: flags.FloatParser().parse,
    str: str,
    tuple: _tuple,
}
