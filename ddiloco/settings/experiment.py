"""All settings of a run, checked once. The rest of the package sees no ConfigDict."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddiloco.config import ConfigError, Leaf, build, leaves, section, setting, to_dict
from ddiloco.goodput.failures import FailureModel, SpareCapacity
from ddiloco.models import MODELS, model_of, name_of
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.settings import loop, removed
from ddiloco.settings.loop import LoopConfig
from ddiloco.settings.remote import RemoteConfig
from ddiloco.tasks import task_class
from ddiloco.telemetry.writers import NEEDS
from ddiloco.training.inner_optimizer import InnerConfig
from ddiloco.training.mesh import MeshConfig

if TYPE_CHECKING:
    from ddiloco.tasks.task import Task

AVAILABILITY = ("steady", "trace", "failures", "spare_capacity")
BY_LEARNER = ("step_seconds", "latency", "bandwidth", "jitter", "loss")


@dataclasses.dataclass(frozen=True)
class VirtualConfig:
    """The simulated hardware. Tuples have one entry for each learner, or one for all."""

    step_seconds: tuple[float, ...] = setting(
        (1.0,), "seconds of a step on all chips of a learner", above=0.0
    )
    speed_variation: float = setting(
        0.0,
        "relative standard deviation of the step time between learners; sampled once",
        at_least=0.0,
        at_most=1.0,
    )
    step_variation: float = setting(
        0.0, "the same between the steps of one learner; sampled for each step", at_least=0.0, at_most=1.0
    )
    latency: tuple[float, ...] = setting((0.0,), "seconds from learner to syncer or back", at_least=0.0)
    bandwidth: tuple[float, ...] = setting((), "bytes a second of a link, each way; (): no bound", above=0.0)
    jitter: tuple[float, ...] = setting(
        (0.0,), "mean seconds of an additional, exponential delay; it can reorder messages", at_least=0.0
    )
    loss: tuple[float, ...] = setting((0.0,), "share of messages that are lost", at_least=0.0, below=1.0)
    seconds: float | None = setting(
        None, "budget of virtual time, which sets train.steps; None: by tokens or steps", above=0.0
    )
    merge_seconds: float = setting(0.0, "seconds of a merge; merges run one after the other", at_least=0.0)
    recovery_seconds: float = setting(
        30.0, "seconds from the start of a learner's process until it joins", at_least=0.0
    )
    resize_seconds: float = setting(
        30.0, "seconds that elastic data-parallel pauses when chips are added or removed", at_least=0.0
    )
    arrays: bool = setting(True, "whether to train; False: only the protocol, its times and its goodput")
    num_chips: int | None = setting(
        None, "chips of all learners, divided evenly; None: one a learner", at_least=1
    )
    availability: str = setting(
        "steady", "model of learners' failures, leaves and joins", choices=AVAILABILITY
    )
    trace: str | None = setting(None, "CSV file of (time, learner, event), for availability=trace")
    timings: tuple[tuple[float, str, float], ...] = setting(
        (), "changes of the timing, each (virtual seconds, setting of sync, value)"
    )
    failures: FailureModel = section(FailureModel)
    spare_capacity: SpareCapacity = section(SpareCapacity)

    def problems(self, num_learners: int) -> Iterator[str]:
        """Settings that contradict each other or the learners, each in a line that begins with the field."""
        if (self.availability == "trace") is (self.trace is None):
            wanted = "must name a file" if self.trace is None else "needs availability to be trace"
            yield f"trace: is {self.trace}, but {wanted}; availability is {self.availability}"
        for name in BY_LEARNER:
            count = len(getattr(self, name))
            if count not in (1, num_learners) and (count or name != "bandwidth"):
                yield f"{name}: has {count} entries, but must have 1, or {num_learners}, one a learner"
        if self.num_chips is not None and self.num_chips < num_learners:
            yield f"num_chips: is {self.num_chips}, but must be at least {num_learners}: one a learner"

    def chips(self, num_learners: int) -> int:
        """Chips of the whole fleet."""
        return num_learners if self.num_chips is None else self.num_chips

    def of(self, name: str, learner: int) -> float:
        """The learner's entry of a tuple."""
        entries = getattr(self, name)
        return entries[learner] if len(entries) > 1 else entries[0]


@dataclasses.dataclass(frozen=True)
class TapeConfig:
    """Whether a run can be replayed."""

    enabled: bool = setting(True, "whether learners and syncer record their events on tapes, for replay")


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """State kept for restarted processes."""

    checkpoint_every: float = setting(
        60.0,
        "seconds between two checkpoints of a learner, which it also writes as it leaves; 0: none",
        at_least=0.0,
    )
    checkpoint_folder: str = setting(
        "", "folder for these, also in a bucket (gs://...); empty: the workdir of each. In learners/ there"
    )
    keep_versions: int = setting(
        3,
        "newest versions of each fragment on the syncer's disk, to roll back to; 1: only the current one",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """Interval, number and timeout of snapshots."""

    every: int = setting(0, "global steps between two; 0: none", at_least=0)
    keep: int = setting(2, "number of complete snapshots kept, the newest", at_least=1)
    timeout: float = setting(
        120.0,
        "seconds for learners to write their checkpoints; more for many bytes and long steps",
        above=0.0,
    )


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Exports during training."""

    every: int = setting(
        0,
        "global steps between two exports of the global model for transformers, of which the newest three "
        "are kept; 0: none",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Logging during training."""

    every: int = setting(4, "steps between two points of a learner's curves", at_least=1)
    writers: tuple[str, ...] = setting(
        ("tensorboard",), "where curves go; the page draws its own", choices=tuple(NEEDS)
    )
    json: bool = setting(False, "whether processes print JSON, an object a line, with its labels")
    peak_flops: float | None = setting(
        None, "peak operations a second of one device, for MFU; None: by its kind", above=0.0
    )
    page: str = setting(
        "127.0.0.1:7071",
        "HOST:PORT of the run's page; on the loopback another port if it is taken; '': none",
    )


DECOUPLED_FAMILY = ("decoupled", "streaming", "diloco")
BASELINES = ("data_parallel", "elastic_data_parallel", "lone_learner")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of training, and rows of a learner."""

    steps: int = setting(480, "T: global steps; a learner is done when its clock reaches them", at_least=1)
    tokens: int | None = setting(
        None,
        "token budget of all learners, from which `steps` then follows; None: by steps",
        at_least=1,
        may_change="process",
    )
    batch_size: int = setting(8, "rows that one learner reads for one step", at_least=1)
    batch_sizes: tuple[int, ...] = setting(
        (), "the same for each learner, if they differ; (): all alike", at_least=1
    )
    sub_shards: int = setting(
        1,
        "parts of a learner's shard with equal shares of its rows: each host reads those that it needs",
        at_least=1,
    )
    executable: str | None = setting(
        None,
        "file of a compiled step, from experiments.compile --save, that learners load; None: they compile",
        may_change="process",
    )
    verify_every: int = setting(
        0,
        "steps between two that a learner computes twice, to find silent data corruption; 0: none",
        at_least=0,
        may_change="process",
    )
    hang_timeout: float | None = setting(
        None,
        "seconds of a step, if more than ten times the median, after which the learner's process ends with "
        "exit code 124, to be restarted; None: never, or with several hosts remote.host_timeout",
        above=0.0,
        may_change="process",
    )
    min_step_seconds: tuple[float, ...] = setting(
        (),
        "minimum seconds of a step, for each learner, to simulate slower hardware; (): none",
        at_least=0.0,
        may_change="process",
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation of the global model on held-out rows."""

    every: int | None = setting(
        48, "global steps between two evaluations; 0: only first and last ones; None: none", at_least=0
    )
    num_batches: int = setting(8, "held-out batches of one evaluation", at_least=1)
    batch_size: int = setting(16, "rows in a held-out batch", at_least=1)
    devices: int = setting(
        0,
        "the local driver's last devices, kept for evaluation; 0: one that no learner uses, if there is any, "
        "else a learner's",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of one run; the types of `data` and `sample` depend on the model's task.

    `model` holds the settings of a model, or a LoopConfig, which has neither data nor task.
    """

    model: Any = setting(
        dataclasses.MISSING,
        "the model and its shape",
        both_ends=True,
        may_change="never",
        because="the saved arrays are of that model",
    )
    algorithm: str = setting(
        "decoupled",
        "how learners synchronise",
        choices=DECOUPLED_FAMILY + BASELINES,
        both_ends=True,
        may_change="never",
        because="what is saved is of that algorithm",
    )
    driver: str = setting(
        "local",
        "what runs the roles: threads, processes, or a simulated clock",
        choices=("local", "remote", "virtual"),
        may_change="process",
    )
    seed: int = setting(
        0,
        "of the initial parameters, the data order and the sample",
        at_least=0,
        at_most=2**32 - 1,
        both_ends=True,
        may_change="never",
        because="it orders the data, and positions in them are of that order",
    )
    init_from: str | None = setting(
        None,
        "safetensors in Hugging Face's layout, a folder or file, to start from; None: random weights",
        may_change="resume",
    )
    data: Any = setting(
        None,
        "the data set, and how it is read into rows",
        both_ends=True,
        may_change="never",
        because="positions in the data are of those data",
    )
    train: TrainConfig = section(TrainConfig, may_change="resume", both_ends=True)
    # These may change because they do not affect the arrays of the inner state.
    inner: InnerConfig = section(InnerConfig, may_change="resume", both_ends=True)
    sync: SyncPolicy = section(SyncPolicy, may_change="resume", both_ends=True)
    outer: OuterConfig = section(OuterConfig, may_change="resume")
    mesh: MeshConfig = section(MeshConfig, may_change="resume")
    remote: RemoteConfig = section(RemoteConfig, may_change="process")
    virtual: VirtualConfig = section(VirtualConfig, may_change="process")
    eval: EvalConfig = section(EvalConfig, may_change="process")
    sample: Any = setting(
        None, "the sample at the end of the run; None where the task has none", may_change="process"
    )
    log: LogConfig = section(LogConfig, may_change="process")
    tape: TapeConfig = section(TapeConfig, may_change="process")
    recovery: RecoveryConfig = section(RecoveryConfig, may_change="process")
    snapshot: SnapshotConfig = section(SnapshotConfig, may_change="process")
    export: ExportConfig = section(ExportConfig, may_change="process")

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """Contradicting settings, each in a line that begins with the one to change."""
        if self.driver == "remote":  # only the first of all problems is shown
            yield from self._problems_of_joining()
        learners, baseline = self.max_learners, self.algorithm in BASELINES
        known = "remote.max_learners" if self._more_learners else "sync.num_learners"
        for name in ("batch_sizes", "min_step_seconds"):
            count = len(getattr(self.train, name))
            if count not in (0, learners):
                yield f"train.{name}: has {count} entries, but {known} is {learners}"
        codecs = len(self.outer.each_codec)
        if not isinstance(self.outer.codec, str) and not self.sync.num_learners <= codecs <= learners:
            yield f"outer.codec: has {codecs} entries, but {known} is {learners}"
        alike = len({self.batch_size(m) for m in range(learners)}) == 1
        parts = self.train.sub_shards
        if any(self.batch_size(m) % parts for m in range(learners)):
            yield f"train.sub_shards: is {parts}, but must divide the rows of each learner's batch"
        if parts > 1 and baseline:
            yield f"train.sub_shards: is {parts}, but must be 1 for {self.algorithm}"
        if self.algorithm in ("data_parallel", "elastic_data_parallel") and not alike:
            yield f"train.batch_sizes: differ, but {self.algorithm} reads as many rows of each shard"
        if self.train.verify_every and baseline:
            yield f"train.verify_every: is {self.train.verify_every}, but must be 0 for {self.algorithm}"
        if self.export.every and (baseline or self.driver == "virtual"):
            only = "but must be 0 but for learners of driver local or remote"
            yield f"export.every: is {self.export.every}, {only}"
        if self.algorithm == "elastic_data_parallel" and self.driver != "virtual":
            yield f"driver: is {self.driver}, but elastic_data_parallel needs virtual"
        if self.eval_devices and (baseline or self.eval.every is None):
            only = "for learners of driver local and an eval.every"
            yield f"eval.devices: is {self.eval.devices}, but must be 0 but {only}"
        if baseline and self.driver == "remote":
            yield f"driver: is remote, but {self.algorithm} is one job, which needs local"
        if self.driver == "virtual":
            again = "where driver is virtual: a virtual run starts again from its seed"
            if self.snapshot.every:
                yield f"snapshot.every: is {self.snapshot.every}, but must be 0 {again}"
            if self.virtual_seconds is not None and self.train.tokens is not None:
                where = "where train.tokens is set"
                yield f"virtual.seconds: is {self.virtual.seconds:g}, but must be None {where}"
        if self.driver == "remote":
            yield from self._problems_of_processes(learners, known, alike)
        if isinstance(self.model, LoopConfig):
            yield from self._problems_of_a_loop()
        sync = self.sync
        plain = (sync.num_fragments, sync.quorum, sync.max_run_ahead) == (1, None, 0)
        if self.algorithm == "diloco" and not plain:
            yield "algorithm: is diloco, which needs sync.num_fragments 1, quorum None and max_run_ahead 0"
        if self.algorithm == "streaming" and (sync.quorum is not None or sync.max_run_ahead is None):
            yield "algorithm: is streaming, which needs sync.quorum None and a sync.max_run_ahead (tau)"
        if self.algorithm == "decoupled" and sync.max_run_ahead is not None:
            yield "algorithm: is decoupled, which needs sync.max_run_ahead None: no learner waits"
        if self.driver == "virtual":
            yield from (f"virtual.{problem}" for problem in self.virtual.problems(sync.num_learners))

    def _problems_of_joining(self) -> Iterator[str]:
        """Whether learners beyond the first ones have anything to read."""
        most, first = self.remote.max_learners, self.sync.num_learners
        if most is None:
            return
        if not first <= most <= 2 * first:
            why = "a shard of the data has two readers at most"
            yield f"remote.max_learners: is {most}, but must be from {first} to {2 * first}: {why}"

    def _problems_of_processes(self, learners: int, known: str, alike: bool) -> Iterator[str]:
        """What does not fit processes; `alike`: whether all of so many learners read as many rows."""
        remote, fragments = self.remote, self.sync.num_fragments
        if len(remote.hosts) not in (0, learners):
            yield f"remote.hosts: has {len(remote.hosts)} entries, but {known} is {learners}"
        if remote.spares and max(remote.hosts, default=1) > 1:
            yield f"remote.spares: is {remote.spares}, but must be 0 where learners have several hosts"
        if remote.min_hosts is not None:
            yield from self._problems_of_fewer_hosts(remote.min_hosts)
        if remote.spares and not alike:
            yield f"remote.spares: is {remote.spares}, but must be 0 where train.batch_sizes differ"
        if (shards := remote.syncer_shards) > fragments:
            yield f"remote.syncer_shards: is {shards}, but must be at most sync.num_fragments, {fragments}"
        if remote.keep_offers and not remote.receipts:
            yield f"remote.keep_offers: is {remote.keep_offers:g}, but must be 0 without remote.receipts"
        if remote.receipts and not self.tape.enabled:
            yield "remote.receipts: is True, which needs tape.enabled"
        if remote.receipts and max(remote.hosts, default=1) > 1:
            yield "remote.receipts: is True, but must be False where learners have several hosts"
        if remote.receipts and importlib.util.find_spec("cryptography") is None:
            yield "remote.receipts: is True, which needs the package cryptography (pip install cryptography)"
        # Which waits end before what they wait for can have come.
        silence, backoff = self.sync.silence_timeout, self.remote.longest_backoff
        snapshot = self.snapshot.timeout
        known = f"sync.silence_timeout, {silence:g}"
        if backoff >= silence:
            why = "a learner that lost its connection would be silent before it tries again"
            yield f"remote.longest_backoff: is {backoff:g}, but must be below {known}: {why}"
        if self.snapshot.every and snapshot <= silence:
            why = "a snapshot leaves out a learner that hangs once it is silent"
            yield f"snapshot.timeout: is {snapshot:g}, but must be above {known}: {why}"

    def _problems_of_fewer_hosts(self, fewest: int) -> Iterator[str]:
        """What does not fit learners that may lose some of their hosts."""
        for count in self.remote.hosts:
            if count % fewest:
                yield f"remote.min_hosts: is {fewest}, but must divide the {count} hosts of each learner"
        if -1 not in self.mesh.sizes:
            yield f"remote.min_hosts: is {fewest}, which needs an axis of the mesh of -1, such as mesh.data"
        if self.mesh.slice > 1:
            yield f"mesh.slice: is {self.mesh.slice}, but must be 1 with remote.min_hosts"
        if self.train.executable is not None:
            yield "train.executable: is of one mesh, but must be None with remote.min_hosts"
        if not self.recovery.checkpoint_every:
            yield "recovery.checkpoint_every: is 0, but must be above 0 with remote.min_hosts"

    def _problems_of_a_loop(self) -> Iterator[str]:
        """Settings that need rows and tokens, which only the loop itself knows."""
        virtual = self.driver == "virtual"
        if self.algorithm in BASELINES and virtual:
            one = ", ".join(DECOUPLED_FAMILY)
            yield f"algorithm: is {self.algorithm}, but a loop in virtual time needs one of {one}"
        unknown = (self.train.tokens if virtual else None, self.virtual_seconds)
        for name, value in zip(("train.tokens", "virtual.seconds"), unknown, strict=True):
            if value is not None:
                yield f"{name}: is {value}, but must be None for a loop in virtual time"
        if self.train.sub_shards > 1:
            yield f"train.sub_shards: is {self.train.sub_shards}, but must be 1 for a loop"
        if self.driver == "remote" and self.remote.min_hosts is not None:
            yield f"remote.min_hosts: is {self.remote.min_hosts}, but must be None for a loop"
        if self.export.every:
            yield f"export.every: is {self.export.every}, but must be 0 for a loop"
        if self.driver == "virtual" and not self.virtual.arrays:
            yield "virtual.arrays: is False, but must be True for a loop"

    @property
    def max_learners(self) -> int:
        """Learners are numbered below it."""
        return self._more_learners or self.sync.num_learners

    @property
    def _more_learners(self) -> int | None:
        return self.remote.max_learners if self.driver == "remote" else None

    @property
    def eval_devices(self) -> int:
        """The last devices, on which no learner trains."""
        return self.eval.devices if self.driver == "local" else 0

    @property
    def virtual_seconds(self) -> float | None:
        """The budget of virtual time; None: none."""
        return self.virtual.seconds if self.driver == "virtual" else None

    def batch_size(self, learner: int) -> int:
        """Rows that the learner reads for one step."""
        return self.train.batch_sizes[learner] if self.train.batch_sizes else self.train.batch_size

    def data_shards(self, learners: Iterable[int]) -> tuple[int, ...]:
        """The shards of the data, sub_shards each, that are theirs.

        A learner beyond sync.num_learners reads another's from their end (`ddiloco/data/shards.py`).
        """
        parts = self.train.sub_shards
        return tuple(m * parts + part for m in learners for part in range(parts))

    @property
    def num_data_shards(self) -> int:
        """The number of shards into which the data is divided."""
        return self.sync.num_learners * self.train.sub_shards

    @property
    def max_hosts(self) -> int:
        """Processes that all learners are at most."""
        return sum(map(self.hosts, range(self.max_learners)))

    @property
    def syncer_shards(self) -> int:
        """Processes that the syncer is."""
        return self.remote.syncer_shards if self.driver == "remote" else 1

    def hosts(self, learner: int) -> int:
        """Processes that driver=remote starts for the learner."""
        return self.remote.hosts[learner] if self.driver == "remote" and self.remote.hosts else 1

    def min_step_seconds(self, learner: int) -> float:
        """The least time that a step of the learner takes, in seconds."""
        return self.train.min_step_seconds[learner] if self.train.min_step_seconds else 0.0


def parse(config: Mapping[str, Any]) -> Experiment:
    """An Experiment from a ConfigDict or from what `to_json` gave; raises ConfigError, in one line."""
    removed.check(config)
    values = dict(config.items())
    model = dict(values.pop("model", {}).items())
    name = model.pop("name", "dense")
    if name == loop.NAME:
        values["model"] = build(LoopConfig, model, "config.model")
        given = [group for group in ("data", "sample") if values.get(group) is not None]
        if given:
            raise ConfigError(f"config.{given[0]}: is there, but a loop of one's own has no such settings")
        return build(Experiment, values)
    if not isinstance(name, str) or name not in MODELS:
        known = ", ".join((*MODELS, loop.NAME))
        raise ConfigError(f"config.model.name: is {name!r}, but must be one of {known}")
    values["model"] = build(MODELS[name].config, model, "config.model")
    task = task_class(MODELS[name].task)
    values["data"] = build(task.data_settings, values.get("data", {}), "config.data")
    if task.sample_settings is not None:
        values["sample"] = build(task.sample_settings, values.get("sample", {}), "config.sample")
    elif values.get("sample") is not None:
        whose = f"{MODELS[name].task} (of the model {name})"
        raise ConfigError(f"config.sample: is there, but {whose} shows nothing")
    experiment = build(Experiment, values)
    try:
        task_of(experiment).check()
    except ValueError as error:
        raise ConfigError(f"config.{error}") from None
    return experiment


def task_of(experiment: Experiment) -> Task:
    """The task of the run's model."""
    e = experiment
    return task_class(model_of(e.model).task)(e.model, e.data, e.sample, e.seed)


def step_tokens(experiment: Experiment) -> int | None:
    """Maximum tokens of a step of any learner; None: known only to the user's loop."""
    if isinstance(experiment.model, LoopConfig):
        return None
    rows = max(experiment.batch_size(m) for m in range(experiment.max_learners))
    return rows * task_of(experiment).row_tokens


def with_steps_of_tokens(experiment: Experiment, step_tokens: int | None = None) -> Experiment:
    """The experiment with `train.steps` set by its budget of tokens, if any, for equally fast learners.

    `step_tokens`: those of a learner's step; None: its rows have them.
    """
    tokens = experiment.train.tokens
    if tokens is None:
        return experiment
    learners = range(1 if experiment.algorithm == "lone_learner" else experiment.sync.num_learners)
    if step_tokens is None:
        length = task_of(experiment).row_tokens
        together = length * sum(experiment.batch_size(m) for m in learners)
    else:
        together = step_tokens * len(learners)
    steps = -(-tokens // together)
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps))


def to_json(experiment: Experiment) -> dict[str, Any]:
    """The settings as JSON values; `parse` of the result gives the same experiment."""
    settings = to_dict(experiment)
    return {**settings, "model": {"name": _model_name(experiment), **settings["model"]}}


def all_settings(experiment: Experiment) -> list[Leaf]:
    """Every setting with its value, its meaning and when it may change, in the order of `to_json`."""
    found = list(leaves(experiment))
    metadata = {**found[0].metadata, "meaning": "which model", "choices": (*MODELS, loop.NAME)}
    return [Leaf("model.name", _model_name(experiment), metadata), *found]


def _model_name(experiment: Experiment) -> str:
    if isinstance(experiment.model, LoopConfig):
        return loop.NAME
    return name_of(experiment.model)


def check_resumable(then: Experiment, now: Experiment, step: int = 0) -> None:
    """Raises ConfigError if a run that was `then`, at this global step, may not go on as it is `now`."""
    before = {leaf.path: leaf for leaf in all_settings(then)}
    after = {leaf.path: leaf for leaf in all_settings(now)}
    for path, leaf in (before | after).items():
        was, is_now = (found[path].value if path in found else None for found in (before, after))
        reason = _why_fixed(leaf, then, now)
        if reason is not None and was != is_now:
            raise ConfigError(f"config.{path}: is {is_now!r}, but must be {was!r} to resume: {reason}")
    if now.train.steps < step:
        raise ConfigError(
            f"config.train.steps: is {now.train.steps}, but must be at least {step}, the step of the snapshot"
        )


def _why_fixed(leaf: Leaf, then: Experiment, now: Experiment) -> str | None:
    """Why this setting must not change; None: it may."""
    if leaf.path == "algorithm" and {then.algorithm, now.algorithm} <= set(DECOUPLED_FAMILY):
        return None
    if leaf.path == "sync.num_learners" and then.algorithm == "lone_learner":
        return "it is the share of the data that the lone learner reads"
    shared = leaf.path in ("sync.num_learners", "remote.max_learners")
    if shared and isinstance(then.model, LoopConfig):
        return "a loop's batches, which it alone knows, are not shared out again"
    return leaf.metadata["because"] if leaf.metadata["may_change"] == "never" else None


OF_DRIVERS = {
    "remote": "remote",
    "virtual": "virtual",
    "eval.devices": "local",
    "train.hang_timeout": "remote",
}
"""By setting or group, the driver whose runs alone use it."""


def why_idle(experiment: Experiment, path: str) -> str | None:
    """Because of which other setting the run does not use the one of this path; None: it does."""
    group, _, name = path.partition(".")
    driver = OF_DRIVERS.get(path) or OF_DRIVERS.get(group)
    if driver not in (None, experiment.driver):
        return f"driver is {experiment.driver}"
    return experiment.outer.idle.get(name) if group == "outer" else None
