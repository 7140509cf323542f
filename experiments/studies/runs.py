"""Runs of `experiments.train` in processes of their own: their commands and their results."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from ddiloco.config import REFUSED, ConfigError, flat
from ddiloco.telemetry.files import read_json
from experiments.cli import exit_handling, program

PROGRAM = "experiments.train"
_MAX_NAME_LENGTH = 200  # file systems allow 255 bytes
_AT_ONCE = "; a second Ctrl-C ends this at once, unsaved"


def folder_name(text: str) -> str:
    """A name for a run's folder that a person can still read; a long one ends in a digest of the whole."""
    name = "".join(c if (c.isascii() and c.isalnum()) or c in "=,._-" else "-" for c in text)
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[: _MAX_NAME_LENGTH - 13]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def default_output(program: str, config: str) -> str:
    """A program's default folder, by its arguments, so that a second call resumes the first."""
    path, _, argument = config.partition(":")
    return f"runs/{folder_name('-'.join(filter(None, (program, pathlib.Path(path).stem, argument))))}"


def finished(workdir: pathlib.Path) -> bool:
    """Whether the run in the folder has come to its end."""
    return bool(read_json(workdir / "summary.json").get("finished"))


_BUDGETS = ("train.tokens", "virtual.seconds")


def lacking(workdir: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """What the run in the folder lacks to stand for these settings; None if nothing.

    A setting that its version did not know yet was at its default, and one that the run makes no use of may
    differ. `settings`: as `ddiloco.settings.experiment.to_json` gives them.
    """
    return differing(workdir, settings) if finished(workdir) else "it has not finished"


def differing(workdir: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """In what the settings of the run in the folder differ from these; None if in nothing that it uses."""
    from ddiloco.settings.experiment import parse, to_json, why_idle

    try:
        old = flat(to_json(parse(json.loads((workdir / "config.json").read_text()))))
    except ConfigError as error:
        return f"its config.json is of another version: {error}"
    except (OSError, ValueError):
        return "its config.json cannot be read"
    new, experiment = flat(settings), parse(settings)
    if any(new[budget] is not None for budget in _BUDGETS):  # then the run finds its steps itself
        new["train.steps"] = old["train.steps"]
    for name in {**new, **old}:  # another model has other settings
        was, now = old.get(name, "not there"), new.get(name, "not there")
        if was != now and why_idle(experiment, name) is None:
            return f"{name} was {was}, but is {now} now"
    return None


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of `experiments.train`, which need not have begun."""

    name: str  # among others
    config: str  # its file, with the preset after a colon
    overrides: Sequence[tuple[str, Any]]
    workdir: pathlib.Path
    settings: Mapping[str, Any]  # all that it then has, as for `lacking`
    idle: Mapping[str, str]  # overrides that it has no use for, and why: they are left out

    def arguments(self) -> list[str]:
        """The arguments of `experiments.train`."""
        overrides = [f"--config.{name}={value}" for name, value in self.overrides]
        return [f"--config={self.config}", f"--workdir={self.workdir}", *overrides]

    def lacks(self) -> str | None:
        """What there is still to do; None if nothing."""
        return lacking(self.workdir, self.settings)

    def command(self) -> list[str]:
        """The arguments with which the run begins or continues; one of other settings is set aside.

        Also one that begins is told that it will be continued: it then ends in time where it is interrupted.
        """
        there = (self.workdir / "config.json").exists()
        other = there and (finished(self.workdir) or differing(self.workdir, self.settings) is not None)
        return [*self.arguments(), *([] if other else self.again())]

    def again(self) -> list[str]:
        """The argument that is added where the run may have begun; a virtual one begins anew."""
        return [] if self.settings["driver"] == "virtual" else ["--resume=auto"]


def plan(name: str, config: str, overrides: Sequence[tuple[str, Any]], workdir: pathlib.Path) -> PlannedRun:
    """The run of that name; to be asked for before any run starts.

    Its command has no override that the run makes no use of: all runs have those of a whole grid.

    Raises:
      UsageError: a setting is unknown or impossible; the message begins with the name and names the field.
    """
    from ddiloco.settings.experiment import parse, to_json, why_idle

    try:
        experiment = parse(program.resolve(config, overrides))
        idle = {path: why for path, _ in overrides if (why := why_idle(experiment, path)) is not None}
        used = [(path, value) for path, value in overrides if path not in idle]
        settings = to_json(parse(program.resolve(config, used)))
    except (program.UsageError, ConfigError) as error:
        raise program.UsageError(f"{name}: {error}") from None
    return PlannedRun(name, config, used, workdir, settings, idle)


def refuse_idle(paths: Iterable[str], planned: Sequence[PlannedRun], flag: str = "config.") -> None:
    """Raises UsageError for the first of these settings that none of the runs has a use for.

    `flag`: what the setting stands behind in the message.
    """
    for path in paths:
        if planned and all(path in run.idle for run in planned):
            raise program.UsageError(f"{flag}{path}: has no use where {planned[0].idle[path]}; leave it out")


def of_each_seed(
    name: str,
    config: str,
    overrides: Sequence[tuple[str, Any]],
    folder: pathlib.Path,
    seeds: Sequence[int],
) -> dict[int, PlannedRun]:
    """A run for each seed, in folders of their own; raises UsageError as `plan` does."""
    return {
        seed: plan(f"{name}, seed {seed}", config, [("seed", seed), *overrides], folder / f"seed={seed}")
        for seed in seeds
    }


def parse_seeds(texts: Sequence[str], flag: str = "seeds") -> list[int]:
    """The seeds of this flag; raises UsageError for none, one twice, or one that is no whole number."""
    for text in texts:
        if not (text.isascii() and text.isdigit()):
            raise program.UsageError(f"{flag}: {text!r} is not a whole number from 0 on")
    seeds = [int(text) for text in texts]
    if not seeds or len(set(seeds)) < len(seeds):
        raise program.UsageError(
            f"{flag}: is {','.join(texts)!r}, but must name at least one seed, none twice"
        )
    return seeds


class Engine(Protocol):
    """Executes runs; `train` says which, and when."""

    def start(self, run: PlannedRun, sharers: int) -> None:
        """Starts the run, one of so many at a time."""

    def wait(self) -> list[tuple[PlannedRun, int]]:
        """Waits until one has ended; returns those that have, with their exit codes."""

    def close(self) -> None:
        """Has runs that are under way save and end, and waits for that; a second Ctrl-C ends them at once."""


class ThisMachine:
    """Runs as processes that divide the cores, and end with this one.

    They are forked from a process that has imported everything, where that can be.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[PlannedRun, BaseProcess]] = {}  # by sentinel

    def start(self, run: PlannedRun, sharers: int) -> None:
        """Starts the run, in its share of the cores."""
        from ddiloco.launch import processes

        environment = processes.share_of_threads(os.environ, sharers)
        process = processes.start(PROGRAM, run.command(), environment, quiet=True)
        self._under_way[process.sentinel] = run, process

    def wait(self) -> list[tuple[PlannedRun, int]]:
        """Waits until one has ended; returns those that have, with their exit codes."""
        ended = []
        for sentinel in connection.wait(list(self._under_way)):
            run, process = self._under_way.pop(sentinel)
            process.join()
            ended.append((run, process.exitcode))
        return ended

    def close(self) -> None:
        """Ends all by SIGTERM; kills them if that is interrupted."""
        started = [process for _, process in self._under_way.values()]
        try:
            for process in started:
                process.terminate()
            for process in started:
                process.join()
        finally:
            for process in started:
                process.kill()


@exit_handling.interrupts()
def train(
    planned: Sequence[PlannedRun],
    jobs: int,
    ended: Callable[[PlannedRun], None],
    engine: Engine | None = None,
) -> list[str]:
    """Runs what lacks something, in order and `jobs` at a time, and names each as it starts.

    Calls `ended` after each. Returns the names of those that failed, with why. What `ended` raises, like
    Ctrl-C, SIGTERM and SIGHUP, has runs under way save and end; the exception is raised again after that.

    Args:
      engine: by default `ThisMachine`.

    Raises:
      UsageError: the first run to end had one, as all others might; those are ended too.
    """
    try:
        return _train(planned, jobs, ended, engine or ThisMachine())
    except KeyboardInterrupt:
        left = sum(run.lacks() is not None for run in planned)
        program.print_err(f"interrupted with {left} of {len(planned)} runs to do; the same command goes on")
        raise


def _train(
    planned: Sequence[PlannedRun], jobs: int, ended: Callable[[PlannedRun], None], engine: Engine
) -> list[str]:
    lacking = [(i, run, run.lacks()) for i, run in enumerate(planned, start=1)]
    waiting = collections.deque((i, run, why) for i, run, why in lacking if why is not None)
    failed, has_run, under_way = [], False, 0
    try:
        while waiting or under_way:
            while waiting and under_way < jobs:
                i, run, why = waiting.popleft()
                again = f", again: {why}" if finished(run.workdir) else ""
                program.print_err(f"[{i}/{len(planned)}] {run.name}{again}")
                engine.start(run, sharers=min(jobs, under_way + 1 + len(waiting)))
                under_way += 1
            for run, code in engine.wait():
                under_way -= 1
                if code == REFUSED and not has_run:
                    raise program.UsageError(f"{run.name}: cannot run; the reason stands above")
                has_run = True
                why = "it cannot run; the reason stands above" if code == REFUSED else run.lacks()
                if code or why:
                    failed.append(f"{run.name} ({why or f'exit status {code}'})")
                ended(run)
    except KeyboardInterrupt as error:
        at_once = "" if isinstance(error, program.Interrupted) else _AT_ONCE
        program.print_err(f"saving what is under way{at_once}")
        raise
    finally:
        engine.close()
    return failed


def report_failed(failed: Sequence[str]) -> int:
    """Names on standard error the runs that failed, if any; returns the exit code."""
    if failed:
        print(f"error: {len(failed)} of the runs failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
