"""One run from its settings to its summary; it writes everything under its workdir."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax

from ddiloco.config import ConfigError
from ddiloco.dashboard.server import PageServer
from ddiloco.dashboard.visitors import NOBODY, Visitors, check_page
from ddiloco.outer.encoding import traffic
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.run import resources
from ddiloco.run.environment import write_environment
from ddiloco.run.exports import Exports, check_exports
from ddiloco.run.recipes import assembly_of, with_steps_of_budget
from ddiloco.settings.experiment import (
    BASELINES,
    Experiment,
    check_resumable,
    parse,
    to_json,
)
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage import array_file, checkpoints, run_mark
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.score_files import FOLDER as SCORES
from ddiloco.storage.workdir import Owner, check_free, owned
from ddiloco.telemetry.files import read_json, replacing
from ddiloco.telemetry.monitor import Monitor, RunInfo
from ddiloco.telemetry.records import Alarm
from ddiloco.telemetry.trimming import OF_RUNS, next_previous
from ddiloco.telemetry.waits import waiting
from ddiloco.telemetry.watches import SkipWatch, StepProfile
from ddiloco.telemetry.writers import check_writers
from ddiloco.training.loop import MakeLoop
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.run_result import Outcome

# What only some runs need, the virtual driver and the baselines, is imported where it is used.

_FULL = (errno.ENOSPC, errno.EDQUOT)

Runner = Callable[[Assembly, Callable[[Any], None], threading.Event], Outcome]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """A program's hooks into its run.

    Attributes:
      claim: takes what else the run needs for itself alone, such as a port; may raise ConfigError.
      fail: makes durable that the run has failed for good, and why, before it ends.
      profile: takes a trace of some steps.
      comes_back: whether another process will go on with a run that is ended early: who waits for the end of
        this one waits for no score and no sample, which that one makes.
    """

    claim: Callable[[], None] = lambda: None
    fail: Callable[[str], None] = lambda why: None
    profile: StepProfile | None = None
    comes_back: Callable[[], bool] = lambda: False


_NO_HOOKS = Hooks()


class Result(NamedTuple):
    """The summary as written, the sample if there is one, and why the run failed, if it did."""

    summary: dict[str, Any]
    sample: str | None
    failure: str | None


def run_job(
    experiment: Experiment,
    workdir: pathlib.Path,
    stop: threading.Event,
    runner: Runner | None = None,
    resume: bool | None = False,
    make_loop: MakeLoop | None = None,
    visitors: Visitors = NOBODY,
    hooks: Hooks = _NO_HOOKS,
) -> Result:
    """Runs an experiment; setting `stop` ends it early, with everything saved.

    First the workdir is locked, then `hooks.claim` called; only then is anything in the workdir touched.

    Args:
      runner: what runs it; None: what `experiment.driver` names. The remote driver has no default.
      resume: whether the run in the workdir goes on, from the newest of all that it has there; None: if one
        has begun. Else an earlier run in the workdir is set aside.
      make_loop: makes the user's own loop, if one is trained; None: what the settings name.
      visitors: who may look at its page from other machines.

    Raises:
      ConfigError, DataError: the run cannot work; raised before anything is trained.
      RunMarkError: the run in the workdir cannot be read, or there is none to resume.
    """
    virtual = experiment.driver == "virtual"
    if resume is not False and virtual:
        raise ConfigError("resume: is of no use to a virtual run, which starts again from its seed")
    check_free(workdir)
    check_page(experiment.log.page, visitors)
    check_writers(experiment.log.writers)
    check_exports(experiment)
    if virtual:
        from ddiloco.virtual.from_settings import check_fleet

        check_fleet(experiment)
        if experiment.virtual.availability == "trace":
            _check_trace(pathlib.Path(str(experiment.virtual.trace)), workdir)
    experiment = with_steps(experiment, lambda: assembly_of(experiment), make_loop)
    assembly = None if virtual and not experiment.virtual.arrays else assembly_of(experiment, make_loop)
    first = (
        "the loop to be made"
        if isinstance(experiment.model, LoopConfig)
        else "data to be prepared and checked"
    )
    if experiment.driver == "remote":
        if runner is None:
            raise ConfigError("config.driver: is remote, which only experiments.train can start")
        if resume is False:  # where an engine starts the syncer, data are its evaluator's concern alone
            with waiting(first):
                assembly.check_syncer()
        # A restarted syncer does not let learners wait for checks that passed before.
        if resume is False or not _has_begun(workdir, resume):
            resources.check_memory(resources.syncer_needs(experiment, assembly.layout), "the syncer")
    elif assembly is not None:
        with waiting(first):
            assembly.check(begins=resume is False or not _has_begun(workdir, resume))
    with owned(workdir):
        hooks.claim()
        going_on = resume is not False and _has_begun(workdir, resume)
        if assembly is not None and not going_on:  # one that goes on waits for room
            resources.check_room(experiment, assembly, workdir)
        with _page(experiment, workdir, visitors):
            return _run_owned(experiment, assembly, workdir, stop, runner, going_on, hooks)


def with_steps(
    experiment: Experiment, assembly: Callable[[], Assembly], make_loop: MakeLoop | None = None
) -> Experiment:
    """The experiment with `train.steps` set by its budget of tokens or of time, if it has one.

    Under the virtual driver a rehearsal finds the steps; else all learners are assumed to be equally fast.
    """
    if experiment.train.tokens is None and experiment.virtual_seconds is None:
        return experiment
    if experiment.driver == "virtual" and experiment.algorithm not in BASELINES:
        from ddiloco.virtual.run import rehearse

        steps = rehearse(experiment, traffic(assembly().layout, experiment.outer))
    elif experiment.train.tokens is not None:
        return with_steps_of_budget(experiment, make_loop)
    else:
        from ddiloco.baselines.virtual import steps_within

        steps = steps_within(experiment, assembly().num_params, experiment.virtual.seconds)
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps))


def _check_trace(trace: pathlib.Path, workdir: pathlib.Path) -> None:
    if workdir.resolve() in trace.resolve().parents:
        raise ConfigError(
            f"config.virtual.trace: {trace} is in the workdir, where an earlier run is set aside as this one "
            "begins; copy it to another folder"
        )


@contextlib.contextmanager
def _page(experiment: Experiment, workdir: pathlib.Path, visitors: Visitors) -> Iterator[None]:
    """Serves the run's page during the run, if the settings ask for it."""
    if not experiment.log.page:
        yield
        return
    server = PageServer(experiment.log.page, [workdir], visitors)
    server.start()
    if os.environ.get("CI", "").lower() != "true":
        print(f"the run's page: {server.url}", flush=True)
    try:
        yield
    finally:
        server.stop()


def _has_begun(workdir: pathlib.Path, resume: bool | None) -> bool:
    """Whether the run in the workdir came to the end of its start."""
    if run_mark.begun(workdir / DURABLE) is not None:
        return True
    if resume is None:
        return False
    raise run_mark.RunMarkError(f"{workdir}: has no run to resume")


def _run_owned(
    experiment: Experiment,
    assembly: Assembly | None,
    workdir: pathlib.Path,
    stop: threading.Event,
    runner: Runner | None,
    resume: bool,
    hooks: Hooks,
) -> Result:
    """Runs a checked experiment, in a workdir that this process has locked."""
    if resume:
        _check_settings(workdir, experiment)
    _write_settings(workdir, experiment, resume)
    info = _run_info(experiment, assembly)
    owner = Owner(workdir)
    monitor = Monitor(
        workdir,
        info,
        log_every=experiment.log.every,
        writers=experiment.log.writers,
        clock=None if experiment.driver == "virtual" else time.time,
        resume=resume,
        check_owner=owner.check,
    )
    monitor.start()
    warnings = () if assembly is None or resume else assembly.recipe.warnings()
    for sentence in warnings:
        monitor.queue.put(Alarm(sentence, 0.0 if experiment.driver == "virtual" else time.time()))
    extra: dict[str, Any] = {"finished": False}
    begun = time.monotonic()
    sample = None
    profile = hooks.profile
    record = monitor.queue.put if profile is None else profile.watching(monitor.queue.put)

    def end(why: str) -> None:
        with contextlib.suppress(OSError):  # of a full disk; this process ends all the same
            hooks.fail(why)
        stop.set()

    skips = SkipWatch(info, experiment.sync.interval, end)
    record = skips.watching(record)
    exports = Exports(experiment, workdir, record) if experiment.export.every else None
    if exports is not None:
        record = exports.watching(record)
    try:
        if runner is not None:
            outcome = runner(assembly, record, stop)
        else:
            outcome = _run(experiment, assembly, record, stop, workdir, hooks.comes_back)
        extra |= {
            "interrupted": stop.is_set() and not outcome.finished and skips.failure is None,
            "driver": experiment.driver,
            "real_seconds": time.monotonic() - begun,
        }
        failure = outcome.failure or skips.failure
        if assembly is None:
            extra["finished"] = outcome.finished
        else:
            extra["params_sha256"] = parameters_sha256(outcome.params)
            folder = workdir / resources.CHECKPOINTS
            _check(owner, workdir)
            try:
                with waiting(f"the checkpoint to be written in {folder}"):
                    checkpoints.save(folder, outcome.step, experiment, outcome.params, outcome.eval_loss)
                extra["finished"] = outcome.finished
            except checkpoints.CheckpointError as error:
                failure = failure or str(error)
            sample = outcome.sample
            if experiment.driver != "remote" and (outcome.finished or not hooks.comes_back()):
                with waiting("the sample"):
                    sample = assembly.sample(outcome.params)
    finally:
        for watch in filter(None, (profile, exports)):
            watch.close()
        summary = monitor.stop(extra)
    if sample is not None:
        with contextlib.suppress(OSError):  # it is printed, too
            (workdir / "sample.txt").write_text(sample + "\n")
    return Result(summary, sample, failure)


def _check(owner: Owner, workdir: pathlib.Path) -> None:
    """Raises ConfigError if another run has the folder now, whose checkpoints these are not."""
    try:
        owner.check()
    except OSError as error:
        raise ConfigError(f"workdir: {workdir}: {error.strerror}; nothing is saved there") from None


def _run(
    experiment: Experiment,
    assembly: Assembly | None,
    record: Callable[[Any], None],
    stop: threading.Event,
    workdir: pathlib.Path | None = None,
    comes_back: Callable[[], bool] = lambda: False,
) -> Outcome:
    if experiment.driver == "local":
        if experiment.algorithm in BASELINES:
            from ddiloco.baselines.wall import BaselineRun as Run
        else:
            from ddiloco.local.run import LocalRun as Run
        return Run(assembly, record, stop, workdir, comes_back).run()
    import ddiloco.baselines.virtual as baselines
    import ddiloco.virtual.run as virtual

    if experiment.algorithm in BASELINES:
        if assembly is not None:
            return baselines.run_virtual_baseline(assembly, record, stop)
        return baselines.run_without_arrays(experiment, assembly_of(experiment).num_params, record, stop)
    if assembly is not None:
        return virtual.VirtualRun(assembly, record, stop, workdir).run()
    plan = traffic(assembly_of(experiment).layout, experiment.outer)
    return virtual.run_without_arrays(experiment, plan, record, stop)


def _check_settings(workdir: pathlib.Path, experiment: Experiment) -> None:
    """Raises ConfigError if the run in the workdir cannot be resumed with these settings."""
    saved = read_json(workdir / "config.json")
    try:
        then = parse(saved) if saved else experiment
    except ConfigError:  # of another version, whose identity is unknown
        return
    check_resumable(then, experiment)


def _write_settings(workdir: pathlib.Path, experiment: Experiment, resume: bool) -> None:
    """Writes config and, in virtual time, learners' availability; raises ConfigError if the disk refuses."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name in OF_RUNS:
            array_file.sweep(workdir, name)
        array_file.sweep(workdir / SCORES)
        if not resume:
            set_aside(workdir)
        resources.check_places(experiment, workdir)
        with replacing(workdir / "config.json") as new:
            new.write_text(json.dumps(to_json(experiment), indent=2) + "\n")
        write_environment(workdir, _devices(experiment))
        if experiment.driver == "virtual" and experiment.algorithm not in BASELINES:
            from ddiloco.virtual.availability import write_trace
            from ddiloco.virtual.from_settings import changes_of

            write_trace(workdir / "availability.csv", changes_of(experiment))
    except OSError as error:
        if not (resume and error.errno in _FULL):  # the run waits for room, with an alarm
            raise ConfigError(
                f"workdir: {workdir}: cannot be written to: {error.strerror or error}"
            ) from None


def _devices(experiment: Experiment) -> set[str]:
    """The kinds of devices on which learners of this process train."""
    trains = experiment.driver == "local" or (experiment.driver == "virtual" and experiment.virtual.arrays)
    return {device.device_kind for device in jax.devices()} if trains else set()


def set_aside(workdir: pathlib.Path, names: Collection[str] = OF_RUNS) -> None:
    """Moves an earlier run in the workdir, files of these names, to `workdir/previous/N`: runs never mix."""
    left = [path for path in workdir.glob("*") if path.name in names]
    if not left:
        return
    target = next_previous(workdir)
    target.mkdir(parents=True)
    for path in left:
        shutil.move(path, target / path.name)
    print(f"the earlier run in {workdir} is now in {target}", file=sys.stderr)


def _run_info(experiment: Experiment, assembly: Assembly | None) -> RunInfo:
    if assembly is None or experiment.driver == "virtual":
        from ddiloco.virtual.from_settings import chips_by_learner

        chips = chips_by_learner(experiment)
    elif experiment.driver == "remote":  # this process does not see their devices: all hosts count the same
        chips = {m: experiment.hosts(m) for m in range(experiment.max_learners)}
    else:
        chips = {learner: mesh.size for learner, (mesh, _) in enumerate(assembly.jobs())}
    first = experiment.sync.num_learners if experiment.driver == "remote" else len(chips)
    return RunInfo(
        algorithm=experiment.algorithm,
        num_learners=first,
        num_params=(assembly or assembly_of(experiment)).num_params,
        num_fragments=0 if experiment.algorithm in BASELINES else experiment.sync.num_fragments,
        total_steps=experiment.train.steps,
        seed=experiment.seed,
        chips_by_learner=chips,
    )
