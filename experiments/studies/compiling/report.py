"""Compiles all programs of a learner for a slice, and reports their needs and their roofline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from ddiloco.config import ConfigError
from ddiloco.outer.codecs import CODECS
from ddiloco.run.environment import installed
from ddiloco.run.recipes import ModelRecipe, assembly_of
from ddiloco.settings.experiment import Experiment, task_of, to_json
from ddiloco.settings.loop import LoopConfig
from ddiloco.training import executable
from ddiloco.training.chips import Chip
from ddiloco.training.evaluation import make_eval_step
from ddiloco.training.mesh import carve
from ddiloco.training.platform import compiler_options
from ddiloco.training.program import traced_step
from ddiloco.training.sharding import parameter_shardings
from ddiloco.training.step import abstract_batch, abstract_state, shard_bytes
from ddiloco.workers.transfer import FragmentTransfer
from experiments.cli.dry_run import anchor_bytes, device_offer_bytes
from experiments.studies.compiling.cost import COLLECTIVES, Cost, cost_of, kernel_flops
from experiments.studies.compiling.hlo import parse
from experiments.studies.compiling.topology import Slice

GIB = 2**30
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program on one chip; bytes as the compiler's memory analysis has them."""

    name: str
    seconds: float
    arguments: float = 0.0
    outputs: float = 0.0
    aliased: float = 0.0
    temp: float = 0.0
    code: float = 0.0
    cost: Cost = dataclasses.field(default_factory=Cost)
    problem: str | None = None  # why there is none; then all else but `temp` is zero

    @property
    def peak(self) -> float:
        """Bytes while it runs; its outputs take the memory of the arguments that it was given for good."""
        return self.arguments + self.outputs - self.aliased + self.temp + self.code

    def as_json(self) -> dict[str, Any]:
        """The figures of this program."""
        sizes = {
            f"{name}_gib": getattr(self, name) / GIB
            for name in ("arguments", "outputs", "aliased", "temp", "code", "peak")
        }
        more = {"problem": self.problem} if self.problem else {}
        return {
            "name": self.name,
            "compile_seconds": self.seconds,
            **sizes,
            "flops": self.cost.flops,
            "hbm_bytes": self.cost.hbm_bytes,
            "collective_bytes": self.cost.bytes_by_kind(),
            "dcn_bytes": self.cost.bytes_by_kind(dcn=True),
            **more,
        }


class Compilation:
    """The programs of one learner of an experiment on a slice."""

    def __init__(self, experiment: Experiment, where: Slice) -> None:
        """Compiles nothing yet; raises ConfigError if mesh, rows and slice do not fit each other."""
        if isinstance(experiment.model, LoopConfig):
            raise ConfigError("config.model.name: is loop, whose step is compiled by whoever wrote it")
        self.experiment, self.slice = experiment, where
        self.mesh: Mesh = carve(where.devices, 1, experiment.mesh)[0]
        self.rows = experiment.batch_size(0)
        recipe = ModelRecipe(experiment)
        recipe.check_fit(self.mesh, self.rows)
        self.layout = assembly_of(experiment).layout
        self._scores = recipe.scores
        self._task = task_of(experiment)
        self._state = abstract_state(experiment.model, experiment.inner, self.mesh)
        self._step: tuple[jax.stages.Lowered, jax.stages.Compiled] | None = None

    def programs(self, print_line: Callable[[str], None]) -> Iterator[CompiledProgram]:
        """Compiles step, evaluation, and each fragment's copy and update; `print_line` takes progress."""
        for name, trace in self._traced():
            with _afresh():
                program = self._compiled(name, trace)
            print_line(f"{name}: {program.seconds:.1f} s")
            yield program

    def save(self, path: pathlib.Path) -> None:
        """Keeps the compiled step in a file, if it could be compiled; raises OSError."""
        if self._step is not None:
            executable.save(path, *self._step, self.mesh)

    @property
    def state_bytes(self) -> float:
        """Parameters and optimizer state on one chip."""
        return shard_bytes(self._state)

    @property
    def copied_bytes(self) -> float:
        """What is copied on one chip at a time, and stays until the disk or a peer has it."""
        e = self.experiment
        if e.snapshot.every or e.recovery.checkpoint_every:
            return self.state_bytes
        return shard_bytes(self._state.opt_state) if e.remote.donor_host else 0.0

    @property
    def model_flops(self) -> float:
        """Of one step on one chip, by the model's own formula."""
        return self._task.step_flops(self.rows) / self.mesh.size

    def _traced(self) -> Iterator[tuple[str, Callable[[], jax.stages.Traced]]]:
        e, task, mesh, params = self.experiment, self._task, self.mesh, self._state.params
        yield (
            "step",
            lambda: traced_step(e.model, e.inner, mesh, self.rows, task.row, task.loss),
        )
        if self._scores:
            held_out = abstract_batch(mesh, e.eval.batch_size, task.row)
            yield "evaluation", lambda: make_eval_step(e.model, mesh, task.loss).trace(params, held_out)
        layout, outer = self.layout, e.outer
        codec = min(outer.codecs, key=lambda name: CODECS[name].exact)  # a lossy one takes more
        settings = codec, outer.error_feedback, e.sync.rebase, not outer.all_exact
        transfer = FragmentTransfer(layout, parameter_shardings(e.model, mesh), *settings)
        for p in range(layout.num_fragments):
            for name, trace in transfer.programs(p, params).items():
                yield f"fragment {p} {name}", trace

    def _compiled(self, name: str, trace: Callable[[], jax.stages.Traced]) -> CompiledProgram:
        traced = trace()
        lowered = traced.lower()
        begun = time.perf_counter()
        try:
            compiled, text = _compiled_with_text(lowered, self.mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _exhausted(name, time.perf_counter() - begun, str(error))
        seconds = time.perf_counter() - begun
        if name == "step":
            self._step = lowered, compiled
        memory = compiled.memory_analysis()
        cost = cost_of(parse(text), self.mesh.size, self.mesh.shape["slice"])
        cost += Cost(flops=kernel_flops(traced.jaxpr.jaxpr, self.mesh.size))
        return CompiledProgram(
            name=name,
            seconds=seconds,
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temp=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            cost=cost,
        )


def report(
    preset: str, topology: str, compilation: Compilation, programs: list[CompiledProgram]
) -> dict[str, Any]:
    """The figures of one learner's programs, JSON values, sizes and operations a chip."""
    step = next(program for program in programs if program.name == "step")
    applied = [p.peak - p.arguments for p in programs if p.name.endswith(" apply")]
    chip, flops = compilation.slice.chip, compilation.model_flops
    learner = compilation.experiment, compilation.layout, compilation.mesh
    anchors, offers, copied = anchor_bytes(*learner), device_offer_bytes(*learner), compilation.copied_bytes
    peak = max(program.peak for program in programs) + anchors + offers + copied
    fits = None if chip is None else peak <= chip.hbm_bytes and not any(p.problem for p in programs)
    return {
        "preset": preset,
        "settings": to_json(compilation.experiment),
        "topology": topology,
        "chips": compilation.mesh.size,
        "mesh": dict(compilation.mesh.shape),
        "rows": compilation.rows,
        "compile_seconds": step.seconds,
        "compile_seconds_of_all": sum(program.seconds for program in programs),
        "argument_gib": step.arguments / GIB,
        "state_gib": compilation.state_bytes / GIB,
        "temp_gib": step.temp / GIB,
        "peak_gib": peak / GIB,
        "hbm_gib": None if chip is None else chip.hbm_bytes / GIB,
        "fits": fits,
        "offers_gib": offers / GIB,
        "anchor_gib": anchors / GIB,
        "state_copy_gib": copied / GIB,
        "fragment_apply_gib": max(applied, default=0.0) / GIB,
        "model_flops": flops,
        "program_flops": step.cost.flops,
        "flops_ratio": step.cost.flops / flops,
        "hbm_bytes": step.cost.hbm_bytes,
        "collective_bytes": step.cost.bytes_by_kind(),
        "dcn_bytes": step.cost.bytes_by_kind(dcn=True),
        "loops_of_unknown_length": step.cost.endless,
        "roofline": None if chip is None or step.problem else roofline(step.cost, flops, chip),
        "programs": [program.as_json() for program in programs],
        "versions": {"jax": None, "libtpu": None, **installed(("jax", "libtpu"))},
    }


def roofline(cost: Cost, model_flops: float, chip: Chip) -> dict[str, Any]:
    """Seconds of a step where compute, HBM and both networks overlap fully, and the MFU that it allows.

    A collective has the links of as many axes of the torus as its group is likely to span: one for up to 4
    chips, two for up to 16, three, where there are as many, beyond.
    """
    seconds = {
        "compute": cost.flops / chip.peak_flops,
        "hbm": cost.hbm_bytes / chip.hbm_bandwidth,
        "interconnect": sum(
            traffic.times * traffic.nbytes / (2 * chip.link_bandwidth * _axes(traffic.group, chip))
            for traffic in cost.collectives.values()
            if not traffic.dcn
        ),
        "dcn": sum(cost.bytes_by_kind(dcn=True).values()) / chip.dcn_bandwidth,
    }
    step = max(seconds.values())
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "step_seconds": step,
        "bound_by": max(seconds, key=lambda name: seconds[name]),
        "mfu": model_flops / (chip.peak_flops * step),
    }


def _axes(group: int, chip: Chip) -> int:
    return min(chip.torus_axes, max(1, math.ceil(math.log(group, 4)))) if group > 1 else 1


def text(found: Mapping[str, Any]) -> str:
    """The figures for reading."""
    shape = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    hbm = "" if found["hbm_gib"] is None else f" of {found['hbm_gib']:.2f} GiB"
    fits = {True: ", fits", False: ", does NOT fit", None: ""}[found["fits"]]
    moved, across = (
        "  ".join(f"{kind} {found[network][kind] / 1e9:.2f}" for kind in COLLECTIVES)
        for network in ("collective_bytes", "dcn_bytes")
    )
    seconds = (
        f"{found['compile_seconds']:.1f} s the step, {found['compile_seconds_of_all']:.1f} s all programs"
    )
    lines = [
        f"{found['preset']} on {found['topology']}: {found['chips']} chips, {shape}, {found['rows']} rows",
        f"compiled     {seconds}",
        f"memory       {found['peak_gib']:.2f} GiB at the peak{hbm}{fits}: "
        f"arguments {found['argument_gib']:.2f} (state {found['state_gib']:.2f}), "
        f"temporaries {found['temp_gib']:.2f}, copies of offers {found['offers_gib']:.2f} "
        f"and of the state {found['state_copy_gib']:.2f}",
        f"operations   {found['program_flops']:.4g} FLOP a chip and step, {found['flops_ratio']:.3f} of the "
        f"model's {found['model_flops']:.4g}",
        f"collectives  GB that a chip sends: {moved}",
    ]
    if found["mesh"]["slice"] > 1:
        lines.append(f"             and to other slices:  {across}")
    line = found["roofline"]
    if line:
        lines.append(
            f"roofline     {line['step_seconds']:.4g} s a step by {line['bound_by']} (compute "
            f"{line['compute_seconds']:.4g}, HBM {line['hbm_seconds']:.4g}, interconnect "
            f"{line['interconnect_seconds']:.4g}, DCN {line['dcn_seconds']:.4g}): "
            f"MFU at most {line['mfu']:.1%}"
        )
    lines += [f"problem      {p['name']}: {p['problem']}" for p in found["programs"] if p.get("problem")]
    return "\n".join(lines)


@contextlib.contextmanager
def _afresh() -> Iterator[None]:
    """Compiles without JAX's cache: its seconds mean nothing, and loaded programs cannot be saved again."""
    used = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()


def _compiled_with_text(lowered: jax.stages.Lowered, mesh: Mesh) -> tuple[jax.stages.Compiled, str]:
    """The compiled program and its text, which libtpu writes itself: JAX cannot read all that it makes."""
    options = compiler_options(mesh)
    if mesh.devices.flat[0].platform != "tpu":
        compiled = lowered.compile(compiler_options=options)
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory(prefix="ddiloco-hlo-") as folder:
        options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        (path,) = pathlib.Path(folder).glob("*.after_optimizations.txt")
        return compiled, path.read_text()


def _exhausted(name: str, seconds: float, message: str) -> CompiledProgram:
    found = _USED.search(message)
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    used = float(found[1]) * scale[found[2]] if found else math.inf
    return CompiledProgram(name, seconds, temp=used, problem=message.splitlines()[0])
