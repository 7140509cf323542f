"""Describes a run by abstract evaluation, without allocating parameters or reading data."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import Mesh

from ddiloco.baselines.virtual import ring_bytes
from ddiloco.models import model_of
from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import encoded_bytes
from ddiloco.outer.fragments import BYTES_PER_ELEMENT, FragmentLayout
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.run import resources
from ddiloco.run.recipes import LoopRecipe, ModelRecipe, assembly_of
from ddiloco.settings.experiment import BASELINES, Experiment, task_of
from ddiloco.settings.loop import LoopConfig
from ddiloco.training.parameters import num_parameters
from ddiloco.training.sharding import parameter_shardings
from ddiloco.training.step import abstract_batch, abstract_state, make_train_step, shard_bytes
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.transfer import placement

_STEP_SECONDS = (0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Bytes that one learner sends, or receives, for each inner step, with one codec."""

    mean: float  # each fragment once in H steps
    peak: float  # the step at which most is due
    data_parallel: float  # ring all-reduce of the gradients between as many data centres as learners


def bandwidth(experiment: Experiment, layout: FragmentLayout, codec: str = "f32") -> Bandwidth:
    """Expected bytes a step of one learner, and of data-parallel training.

    `codec`: of offers or of updates.
    """
    sync, sizes = experiment.sync, encoded_bytes(layout, codec)
    schedule = sync.schedule(None)
    due = [sum(sizes[p] for p in schedule.due(step)) for step in range(1, sync.interval + 1)]
    return Bandwidth(
        mean=sum(sizes) / sync.interval,
        peak=float(max(due)),
        data_parallel=ring_bytes(sum(layout.bytes) // BYTES_PER_ELEMENT, sync.num_learners),
    )


def describe(experiment: Experiment) -> str:
    """The text that `--dry_run` prints; a loop of one's own is made for it, but takes no step.

    Raises:
      ConfigError: mesh and rows do not fit the devices here, or the fragments do not fit the model.
    """
    assembly = assembly_of(experiment)
    loop = isinstance(experiment.model, LoopConfig)
    head = _loop_head(assembly) if loop else _model_head(assembly)
    if experiment.algorithm in BASELINES:
        return "\n".join(head)
    layout = assembly.layout
    return "\n".join(
        [*head, *_hosts(experiment, layout), *_fragments(layout), *_bandwidth(experiment, layout)]
    )


def _loop_head(assembly: Assembly) -> list[str]:
    """What a loop shows as it is made: its parameters and the rest of its state."""
    jobs, recipe = assembly.jobs(), assembly.recipe
    assert isinstance(recipe, LoopRecipe)
    (mesh, shards), params = jobs[0], assembly.num_params
    program = recipe.uncompiled(mesh, shards[0])
    own = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=program.shardings[name])
        for name, shape in program.shapes.items()
    ]
    return [
        *_first_lines(assembly, params),
        f"memory       {_size(shard_bytes(own))} of parameters and "
        f"{_size(shard_bytes(program.inner_leaves))} of other state on each device",
    ]


def _first_lines(assembly: Assembly, params: int, activated: str = "") -> list[str]:
    experiment, jobs = assembly.experiment, assembly.jobs()
    baseline = experiment.algorithm in BASELINES
    shape = " ".join(f"{axis}={size}" for axis, size in jobs[0][0].shape.items())
    return [
        f"algorithm    {experiment.algorithm}, {'one job' if baseline else f'{len(jobs)} learners'}",
        f"parameters   {params:,} ({_size(BYTES_PER_ELEMENT * params)} in float32){activated}",
        f"mesh         {shape} for {_each(experiment)}, {len(jax.devices())} devices in all",
    ]


def _each(experiment: Experiment) -> str:
    return "the job" if experiment.algorithm in BASELINES else "each learner"


def _model_head(assembly: Assembly) -> list[str]:
    experiment = assembly.experiment
    recipe, task, jobs = ModelRecipe(experiment), task_of(experiment), assembly.jobs()
    baseline = experiment.algorithm in BASELINES
    for mesh, shards in jobs:
        recipe.check_fit(mesh, recipe.kind(shards))
    mesh, rows = jobs[0][0], recipe.kind(jobs[0][1])
    state = abstract_state(experiment.model, experiment.inner, mesh)
    step = make_train_step(experiment.model, experiment.inner, mesh, task.loss)
    jax.eval_shape(step, state, abstract_batch(mesh, rows, task.row), np.float32(0.0))
    anchors = ""
    if not baseline:
        kept = anchor_bytes(experiment, assembly.layout, mesh)
        offers = device_offer_bytes(experiment, assembly.layout, mesh)
        versions = f"{_size(kept)} for adopted versions, " if kept else ""
        anchors = f";\n             {versions}up to {_size(offers)} for offers"
    params = num_parameters(experiment.model)
    length = task.row_tokens
    tokens = sum(recipe.kind(shards) for _, shards in jobs) * length
    return [
        *_first_lines(assembly, params, _activated(experiment, params)),
        f"memory       {_size(shard_bytes(state))} of parameters and optimizer state on each device{anchors}",
        f"step         {rows} x {length} tokens and {task.step_flops(rows):.3g} FLOP for "
        f"{_each(experiment)}, {tokens:,} tokens in all",
    ]


def _hosts(experiment: Experiment, layout: FragmentLayout) -> list[str]:
    """What each process needs of its host's memory."""
    syncer = resources.syncer_needs(experiment, layout)
    shards = experiment.syncer_shards
    hosts = experiment.hosts(0)
    learner, giving = (
        resources.learner_needs(experiment, layout, hosts),
        resources.donor_bytes(experiment) // hosts,
    )
    of_syncer = f"syncer {_size(syncer.most)} ({_size(syncer.least)} all the time)"
    if shards > 1:
        others = (resources.syncer_needs(experiment, layout, shard) for shard in range(1, shards))
        largest = max(needs.most for needs in others)
        of_syncer = f"first of {shards} syncer shards {_size(syncer.most)}, each other {_size(largest)}"
    slack, every = experiment.sync.overlap, range(layout.num_fragments)
    arriving = resources.round_bytes(layout, experiment.outer, experiment.max_learners, every)
    leaving = resources.offer_bytes(layout, experiment.outer) // hosts
    scoring = []
    if experiment.driver == "remote" and experiment.eval.every is not None:
        evaluator = _size(resources.evaluator_needs(experiment, layout).most)
        scoring = [f"             evaluator {evaluator} where its device is the CPU;"]
    late = []
    if experiment.sync.takes_late_work:
        held, kept = resources.late_offers(layout, experiment.outer)
        late = [
            f"             each learner whose offers miss their rounds: syncer {_size(held)}, "
            f"learner up to {_size(kept / hosts)};"
        ]
    return [
        f"host memory  {of_syncer},",
        f"             learner {_size(learner.most)} a host beside its devices, "
        f"of it {_size(giving)} to give its inner state to a peer;",
        *scoring,
        f"             each round more that links slower than {slack} steps keep on its way: "
        f"syncer {_size(arriving)}, learner {_size(leaving)};",
        *late,
        f"             this host has {_size(resources.host_memory())}",
    ]


def _activated(experiment: Experiment, params: int) -> str:
    """The number of parameters that a token uses, if not all."""
    idle = model_of(experiment.model).idle_parameters
    return "" if idle is None else f", {params - idle(experiment.model):,} activated by a token"


def anchor_bytes(experiment: Experiment, layout: FragmentLayout, mesh: Mesh) -> int:
    """What a codec of outer gradients keeps on a device: adopted versions, and what encodings left out."""
    outer = experiment.outer
    if outer.all_exact and not experiment.sync.rebase:
        return 0
    return sum(_fragment_bytes(experiment, layout, mesh)) * (2 if outer.error_feedback else 1)


def device_offer_bytes(experiment: Experiment, layout: FragmentLayout, mesh: Mesh) -> int:
    """What copies of the last offers take on a device, at most."""
    sizes = _fragment_bytes(experiment, layout, mesh)
    return resources.device_offers(layout, experiment.outer, experiment.sync, sizes)


def _fragment_bytes(experiment: Experiment, layout: FragmentLayout, mesh: Mesh) -> list[int]:
    """Float32 bytes of each fragment on a device."""
    shardings = parameter_shardings(experiment.model, mesh)
    return [
        BYTES_PER_ELEMENT
        * sum(
            math.prod(sharding.shard_shape(shape))
            for sharding, shape in zip(placement(layout, p, shardings), layout.piece_shapes(p), strict=True)
        )
        for p in range(layout.num_fragments)
    ]


def _fragments(layout: FragmentLayout) -> list[str]:
    lines = [
        f"fragments    {layout.num_fragments} by strategy {layout.strategy}; "
        f"balance {layout.balance:.3f} (largest over mean)",
    ]
    for p, size in enumerate(layout.bytes):
        bar = "#" * round(24 * size / max(layout.bytes))
        lines.append(f"  {p:3d}  {_size(size):>10}  {len(layout.fragments[p]):4d} pieces  {bar}")
    return lines


def _bandwidth(experiment: Experiment, layout: FragmentLayout) -> list[str]:
    moved = {codec: bandwidth(experiment, layout, codec) for codec in CODECS}
    outer, plain = experiment.outer, moved["f32"]
    up = ", ".join(f"{_size(moved[codec].mean)} up in {codec}{_who(outer, codec)}" for codec in outer.codecs)
    lines = [
        f"bandwidth    a step and learner: {up}, "
        f"{_size(moved[outer.update_codec].mean)} down in {outer.update_codec}, "
        f"at the peak {plain.peak / plain.mean:.2f} times as much;",
        f"             data-parallel over the same links {_size(plain.data_parallel)} each way "
        "(bfloat16 ring all-reduce)",
        "             Gbit/s one way by codec:",
        f"             step time {''.join(f'{codec:>9}' for codec in CODECS)}   data-parallel",
    ]
    for seconds in _STEP_SECONDS:
        means = "".join(f"{8e-9 * b.mean / seconds:9.3f}" for b in moved.values())
        lines.append(f"             {seconds:7.1f} s {means} {8e-9 * plain.data_parallel / seconds:15.3f}")
    return lines


def _who(outer: OuterConfig, codec: str) -> str:
    """The learners that send in the codec, where codecs differ."""
    whose = [str(m) for m, own in enumerate(outer.each_codec) if own == codec]
    return "" if len(outer.codecs) == 1 else f" (learner{'s' * (len(whose) > 1)} {', '.join(whose)})"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    raise AssertionError
