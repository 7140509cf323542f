"""A run of real processes under a plan of faults, and its outcome."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddiloco.launch.supervisor import FailureStudy, run_all
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment
from ddiloco.storage import run_mark
from ddiloco.storage.durable import DurableState, DurableStateError
from ddiloco.telemetry.files import read_json
from experiments.cli import program
from experiments.studies.chaos import checks_after
from experiments.studies.chaos.killer import Journal, Killer
from experiments.studies.chaos.processes import DEEDS, HOSTILE, SYNCER, PlannedFault, learner_name
from experiments.studies.chaos.proxy import Proxy
from experiments.studies.chaos.run_files import Trace, read_trace

_LOOK = 0.2  # seconds between two looks at whether all learners step


class StormOutcome(NamedTuple):
    """The outcome of a run: its part of chaos.json, its files, and its exit code."""

    figures: dict[str, Any]
    trace: Trace
    code: int


def run(
    experiment: Experiment,
    workdir: pathlib.Path,
    faults: pathlib.Path,
    plan: Sequence[PlannedFault],
    stop: threading.Event,
    overrides: Sequence[str] = (),
    honest: int | None = None,
) -> StormOutcome:
    """Runs the experiment's processes, of the command line's config and these overrides, under the plan.

    Args:
      faults: file for the journal of what befell it.
      plan: the faults, whose time counts from when all learners have stepped.
      stop: once set, the run saves what it has and ends.
      honest: learners whose processes are those of experiments.learner; the others are hostile. None: all.
    """
    honest = experiment.sync.num_learners if honest is None else honest
    over, struck = threading.Event(), threading.Event()
    watch = StormWatch(experiment, workdir, Journal(faults), over, honest)

    def strike() -> None:
        try:
            while not over.wait(_LOOK) and not watch.all_step():
                pass
            watch.journal.write("storm")
            Killer(watch.pid, watch.cut, watch.journal).run(plan, over)
        finally:
            struck.set()

    threading.Thread(target=strike, name="killer", daemon=True).start()
    arguments = [*program.config_arguments(), *overrides]
    try:
        played = dict.fromkeys(range(honest, experiment.sync.num_learners), HOSTILE)
        study = FailureStudy(watch.observe, watch.route, played)
        code = run_all(experiment, arguments, workdir, stop, program.print_err, study=study)
    finally:
        over.set()
        struck.wait()
        watch.close()
    trace = read_trace(workdir, faults, honest)
    summary = read_json(workdir / "summary.json")
    figures = checks_after.report(trace, summary.get("eval_loss"), experiment.sync.num_fragments)
    if played:
        figures["hostile"] = checks_after.hostility(summary, read_json(workdir.parent / DEEDS), played)
    return StormOutcome(figures, trace, code)


def undisturbed(experiment: Experiment, figures: dict[str, Any], honest: int) -> tuple[Experiment, list[str]]:
    """A run of the honest learners without faults, that trains on as many tokens, and its overrides.

    Its steps follow from how fast the clock went in the run of these figures.
    """
    rows = sum(experiment.batch_size(m) for m in range(honest))
    steps = round(figures["tokens"] * figures["clock_rate"] / (rows * experiment.data.sequence_length))
    train = {"steps": max(1, steps)}
    sync: dict[str, Any] = {}
    if honest < experiment.sync.num_learners:
        train["min_step_seconds"] = experiment.train.min_step_seconds[:honest]
        sync["num_learners"] = honest
    overrides = [f"--config.train.{name}={value}" for name, value in train.items()]
    overrides += [f"--config.sync.{name}={value}" for name, value in sync.items()]
    alone = dataclasses.replace(
        experiment,
        train=dataclasses.replace(experiment.train, **train),
        sync=dataclasses.replace(experiment.sync, **sync),
    )
    return alone, overrides


class StormWatch:
    """The processes of a run as the killer sees them, and their links; writes down their starts and ends."""

    def __init__(
        self,
        experiment: Experiment,
        workdir: pathlib.Path,
        journal: Journal,
        over: threading.Event,
        honest: int,
    ) -> None:
        """`over` is set once a learner has done its last step: what remains is the end, not a run.

        Only the first `honest` learners are looked at.
        """
        self.journal, self._over = journal, over
        self._workdir = workdir
        self._learners = range(honest)
        self._targets = {SYNCER, *map(learner_name, self._learners)}
        self._layout = assembly_of(experiment).layout
        self._pids: dict[str, int] = {}
        self._proxies: dict[str, Proxy] = {}

    def observe(self, name: str, pid: int, code: int | None) -> None:
        """Notes a start or an end, and what a syncer leaves on disk, before it is restarted."""
        target = SYNCER if name.endswith(SYNCER) else name
        if target not in self._targets:
            return
        if code is None:
            self.journal.write("start", target, pid=pid)
            self._pids[target] = pid
            return
        self._pids.pop(target, None)
        if code == 0:
            self._over.set()
        left = self._durable() if target == SYNCER else {}
        self.journal.write("end", target, pid=pid, code=code, **left)

    def route(self, learner: int, address: str) -> str:
        """The address of the learner's proxy, which passes on to the syncer's."""
        host, port = address.rsplit(":", 1)
        proxy = self._proxies[learner_name(learner)] = Proxy((host, int(port))).start()
        return "{}:{}".format(*proxy.address)

    def pid(self, target: str) -> int | None:
        """The target's process, if it runs."""
        return self._pids.get(target)

    def cut(self, target: str, apart: bool) -> None:
        """Cuts a learner off, or heals that."""
        proxy = self._proxies[target]
        (proxy.partition if apart else proxy.heal)()

    def all_step(self) -> bool:
        """Whether every learner has stepped."""
        paths = [self._workdir / "learners" / str(m) / "steps.jsonl" for m in self._learners]
        return all(path.is_file() and path.stat().st_size for path in paths)

    def close(self) -> None:
        """Ends the proxies and the journal."""
        for proxy in self._proxies.values():
            proxy.close()
        self.journal.close()

    def _durable(self) -> dict[str, Any]:
        folder = self._workdir / "syncer"
        try:
            mark = run_mark.begun(folder)
            run = "" if mark is None else mark.run
            durable = DurableState(folder, self._layout, lambda record: None, threading.Event(), run)
            versions = list(durable.state().versions)
            for p in range(self._layout.num_fragments):
                durable.fragment(p)  # whole, so that damage is found
            return {"versions": versions}
        except (DurableStateError, run_mark.RunMarkError) as error:
            return {"problem": str(error)}
