"""Runs under the virtual driver, with what was compiled for one of them shared by all."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

from ddiloco.baselines.virtual import run_virtual_baseline
from ddiloco.goodput.accounting import State, Timelines
from ddiloco.observe import records
from ddiloco.outer.encoding import FragmentDecoder
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.outer.outer_step import OuterStep
from ddiloco.roles.assembly import Assembly
from ddiloco.roles.outcome import Outcome
from ddiloco.run import job
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.virtual.from_settings import chips_by_learner
from ddiloco.virtual.run import VirtualRun as FleetRun
from tests import workbench


def virtual(data_dir: str, algorithm: str = "decoupled", **groups: Any) -> Experiment:
    """The smallest experiment under the virtual driver."""
    return workbench.experiment(data_dir, algorithm, driver="virtual", **groups)


class Workshop:
    """Makes assemblies that compile only what none before them has; all on one device."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def assembly(self, experiment: Experiment, make_loop: None = None) -> Assembly:
        """An assembly of the experiment."""
        e = experiment
        made = assembly_of(e)
        steps = (e.model, e.inner, e.train.steps, e.data.sequence_length)
        self._share(made, "_program", steps)
        self._share(made, "_transfer", (e.model, e.sync.num_fragments, e.outer))
        self._share(made, "scorer", (e.model, e.data, e.eval))
        return made

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """On one device, and the outer steps and decoders are shared too."""
        make, make_decoder = OuterStep._compiled, FragmentDecoder._compiled

        def compiled(step: OuterStep, *key: Hashable) -> Any:
            return self._once((step._config, step._num_learners, *key), lambda: make(step, *key))

        def decoder(decode: FragmentDecoder, shapes: Hashable) -> Any:
            return self._once(("decoder", decode._name, shapes), lambda: make_decoder(decode, shapes))

        with (
            mock.patch.object(OuterStep, "_compiled", compiled),
            mock.patch.object(FragmentDecoder, "_compiled", decoder),
            workbench.devices(1),
        ):
            yield

    def run(self, experiment: Experiment, stop: threading.Event | None = None) -> "VirtualRun":
        """Runs the experiment to its end."""
        taken: list[Any] = []
        stop = stop or threading.Event()
        with self.open():
            assembly = self.assembly(experiment)
            if experiment.algorithm in BASELINES:
                outcome = run_virtual_baseline(assembly, taken.append, stop)
            else:
                outcome = FleetRun(assembly, taken.append, stop).run()
        return VirtualRun(outcome, taken, experiment)

    def timed(self, experiment: Experiment) -> "VirtualRun":
        """Runs the experiment without arrays."""
        taken: list[Any] = []
        outcome = job._run(experiment, None, taken.append, threading.Event())
        return VirtualRun(outcome, taken, experiment)

    def job(self, experiment: Experiment, workdir: pathlib.Path) -> job.Result:
        """Runs the experiment as a whole job, that leaves its files in `workdir`."""
        with self.open(), mock.patch.object(job, "assembly_of", self.assembly):
            return job.run_job(experiment, workdir, threading.Event(), live=False)

    def _share(self, assembly: Assembly, name: str, settings: Hashable) -> None:
        make: Callable[..., Any] = getattr(assembly, name)
        setattr(assembly, name, lambda *key: self._once((name, settings, *key), lambda: make(*key)))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@functools.cache
def shared_workshop() -> Workshop:
    """The one workshop of a process: modules of tests share what is compiled."""
    return Workshop()


@dataclasses.dataclass
class VirtualRun:
    """A virtual run that is over, with all that it recorded."""

    outcome: Outcome
    records: list[Any]
    experiment: Experiment

    @property
    def sha256(self) -> str:
        """Of the final parameters."""
        return parameters_sha256(self.outcome.params)

    @property
    def seconds(self) -> float:
        """Virtual seconds from the first record to the last."""
        return max(record.time for record in self.records if hasattr(record, "time"))

    def of(self, kind: type) -> list[Any]:
        """The records of a kind, in the order in which they came."""
        return [record for record in self.records if isinstance(record, kind)]

    def noted(self, name: str) -> list[Any]:
        """The values of the protocol's records of a name."""
        return [record.values for record in self.of(records.Noted) if record.name == name]

    def steps(self, learner: int) -> list[records.StepDone]:
        """The steps of a learner."""
        return [record for record in self.of(records.StepDone) if record.learner == learner]

    def states(self, learner: int) -> list[tuple[float, State, int | None]]:
        """When a learner came into which state, with how many chips."""
        return [(r.time, r.state, r.chips) for r in self.of(records.StateChanged) if r.learner == learner]

    def merges(self, *fields: str) -> list[tuple]:
        """These fields of every merge, in order; a list of learners as a tuple."""
        fixed = [{**values, "learners": tuple(values["learners"])} for values in self.noted("round")]
        return [tuple(values[name] for name in fields) for values in fixed]

    @property
    def tokens(self) -> collections.Counter:
        """Tokens by learner."""
        counted: collections.Counter = collections.Counter()
        for record in self.of(records.StepDone):
            counted[record.learner] += record.tokens
        return counted

    @property
    def timelines(self) -> Timelines:
        """What the recorded states add up to."""
        lines = Timelines(chips_by_learner(self.experiment))
        for record in self.of(records.StateChanged):
            lines.enter(record.learner, record.state, record.time, record.chips)
        return lines
