"""What a run needs, from shapes alone, and whether it is available: memory of its hosts, room on its disk."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.config import ConfigError
from ddiloco.outer.codecs import CODECS
from ddiloco.outer.encoding import encoded_bytes, traffic
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.optimizer import OuterConfig, make_outer_optimizer
from ddiloco.protocol.learner import KEPT_OFFERS
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.settings.experiment import BASELINES, Experiment, task_of
from ddiloco.settings.loop import LoopConfig
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.storage.snapshots import FOLDER as SNAPSHOTS
from ddiloco.storage.workdir import check_inside, free_bytes
from ddiloco.telemetry import formatting
from ddiloco.telemetry.trimming import FOLDERS, OF_RUNS
from ddiloco.training.evaluation import make_eval_step
from ddiloco.training.mesh import MeshConfig, carve
from ddiloco.training.step import abstract_batch, abstract_state
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.learner_arrays import DEVICE_OFFERS

_GIB = 1 << 30
_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class Needs(NamedTuple):
    """Bytes of one host's memory.

    Attributes:
      least: what is there all the time, or must be there once: a host with less cannot run the process.
      most: with all that may be under way at a time.
    """

    least: int
    most: int


def merging_needs(
    layout: FragmentLayout, outer: OuterConfig, overlap: int, learners: int, fragments: Sequence[int]
) -> Needs:
    """Memory of a syncer's process that merges these fragments, with up to so many learners.

    Always there are of each fragment the newest version, the one before, whose memory the next takes, the
    outer optimizer's state, and what the update codec left out. Each of `overlap` rounds, and one that is
    asked for, adds all learners' offers, encoded, and a copy of the state on its way to the disk.
    """
    lossy = outer.update_codec != "f32"
    kept = sum((3 if lossy else 2) * layout.bytes[p] + _outer_state(layout, outer, p) for p in fragments)
    return Needs(kept, kept + (overlap + 1) * round_bytes(layout, outer, learners, fragments))


def round_bytes(layout: FragmentLayout, outer: OuterConfig, learners: int, fragments: Sequence[int]) -> int:
    """Additional memory of one open round; links slower than the overlap keep more rounds open."""
    sizes = [encoded_bytes(layout, outer.codec_of(m)) for m in range(learners)]
    return max(sum(each[p] for each in sizes) + _outer_state(layout, outer, p) for p in fragments)


def syncer_needs(experiment: Experiment, layout: FragmentLayout, shard: int = 0) -> Needs:
    """Memory of one shard of the syncer.

    The first begins with all parameters and ends with the result, beside what that is made of.
    """
    e, whole = experiment, sum(layout.bytes)
    own = fragments_of(shard, e.syncer_shards, layout.num_fragments)
    merging = merging_needs(layout, e.outer, e.sync.overlap, e.max_learners, own)
    exported = whole if e.export.every else 0
    return merging if shard else Needs(max(merging.least, whole), merging.most + whole + exported)


def evaluator_needs(experiment: Experiment, layout: FragmentLayout) -> Needs:
    """Memory of an evaluator on the CPU, as beside a syncer.

    It has the parameters, reads a fragment with the outer optimizer's state, and scores. Of what a loop does
    while it scores only the loop knows: the parameters are there again, as its tree.
    """
    e, whole = experiment, sum(layout.bytes)
    read = max(2 * size + _outer_state(layout, e.outer, p) for p, size in enumerate(layout.bytes))
    return Needs(whole, whole + read + (whole if isinstance(e.model, LoopConfig) else _scoring_bytes(e)))


def learner_needs(experiment: Experiment, layout: FragmentLayout, hosts: int) -> Needs:
    """Host memory of each of a learner's hosts, beside its devices' memory, which on CPU is the host's too.

    A learner that joins holds the welcome, the tensors made of it, its own copy of the inner state and a
    peer's. One that steps holds the versions from which differences count, fragments that come and go, and
    the copies of its state that go to the disk, to a snapshot, and as a donor to a peer.
    """
    e, outer = experiment, experiment.outer
    whole, inner = sum(layout.bytes), inner_bytes(e)
    joining = 2 * whole + 2 * inner
    kept = whole if outer.update_codec != "f32" else 0
    kept += (e.sync.overlap + 1) * offer_bytes(layout, outer)
    anchors = (not outer.all_exact or e.sync.rebase) + outer.error_feedback
    copies = int(bool(e.recovery.checkpoint_every or e.snapshot.every))
    kept += copies * ((1 + anchors) * whole + inner)
    return Needs(whole // hosts, max(joining, kept + donor_bytes(e)) // hosts)


def offer_bytes(layout: FragmentLayout, outer: OuterConfig) -> int:
    """The share of an offer in the widest codec, from when it is made until its update has come."""
    return max(map(max, traffic(layout, outer).offers)) + max(layout.bytes)


def kept_offers(layout: FragmentLayout, outer: OuterConfig, rebase: bool, sizes: Sequence[int]) -> list[int]:
    """What a learner keeps of an offer of each fragment, of these float32 `sizes`, until it is merged.

    With rebase that is the outer gradient, which in an exact codec is what is sent. A lossy one adds the
    encoding, and error feedback what that leaves out. Where codecs differ it is that of most bytes.
    """

    def kept(codec: str) -> list[int]:
        apart = (rebase and not CODECS[codec].exact) + outer.with_codec(codec).error_feedback
        shares = zip(encoded_bytes(layout, codec), layout.bytes, sizes, strict=True)
        return [math.ceil((apart + sent / whole) * size) for sent, whole, size in shares]

    return max(map(kept, outer.codecs), key=sum)


def device_offers(layout: FragmentLayout, outer: OuterConfig, sync: SyncPolicy, sizes: Sequence[int]) -> int:
    """The most that copies of offers take on a device that has these float32 `sizes` of each fragment."""
    each = kept_offers(layout, outer, sync.rebase, sizes)
    return sum(sorted((KEPT_OFFERS if sync.takes_late_work else 1) * each)[-DEVICE_OFFERS:])


def late_offers(layout: FragmentLayout, outer: OuterConfig) -> tuple[int, int]:
    """Host memory more for a learner whose offers miss their rounds: at the syncer, and on the learner.

    The syncer has one offer of each fragment, encoded; the learner KEPT_OFFERS, at most.
    """
    kept = KEPT_OFFERS * sum(kept_offers(layout, outer, True, layout.bytes))
    return max(sum(encoded_bytes(layout, codec)) for codec in outer.codecs), kept


def donor_bytes(experiment: Experiment) -> int:
    """The share that a learner needs to give its inner state to a peer."""
    if experiment.remote.donor_port is None:
        return 0
    from ddiloco.remote.learner.donor import AT_ONCE  # and gRPC with it

    return AT_ONCE * inner_bytes(experiment)


def outer_bytes(experiment: Experiment, layout: FragmentLayout) -> int:
    """The outer optimizer's state of all fragments."""
    return sum(_outer_state(layout, experiment.outer, p) for p in range(layout.num_fragments))


def inner_bytes(experiment: Experiment) -> int:
    """The inner optimizer's state; 0 for a loop, whose state is unknown."""
    if isinstance(experiment.model, LoopConfig):
        return 0
    mesh = carve(jax.devices()[:1], 1, MeshConfig())[0]
    return _bytes(abstract_state(experiment.model, experiment.inner, mesh).opt_state)


def host_memory() -> int:
    """Bytes that this process may have: the machine's, or fewer by its control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            limits.append(int(path.read_text()))
    return min(limits)


def check_memory(needs: Needs, whose: str) -> None:
    """Raises ConfigError if the process cannot be on this host at all; `whose` begins the line."""
    if needs.least > (available := host_memory()):
        sizes = f"{needs.least / _GIB:.1f} GiB of memory, and this host has {available / _GIB:.1f} GiB"
        raise ConfigError(f"{whose} needs at least {sizes}; see --dry_run")


def _scoring_bytes(experiment: Experiment) -> int:
    """Memory for scoring a batch beside the parameters, on one CPU device."""
    e, task = experiment, task_of(experiment)
    mesh = carve(jax.devices("cpu")[:1], 1, MeshConfig())[0]
    params = abstract_state(e.model, e.inner, mesh).params
    rows = abstract_batch(mesh, e.eval.batch_size, task.row)
    compiled = make_eval_step(e.model, mesh, task.loss).lower(params, rows).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _outer_state(layout: FragmentLayout, outer: OuterConfig, p: int) -> int:
    pieces = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in layout.piece_shapes(p))
    return _bytes(jax.eval_shape(make_outer_optimizer(outer).init, pieces))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


CHECKPOINTS = "checkpoints"  # of a run, in its workdir


def check_places(experiment: Experiment, workdir: pathlib.Path) -> None:
    """Tries what an earlier start has left in the workdir, where the run goes on with it; raises OSError."""
    names = {name: name in FOLDERS for name in sorted(OF_RUNS)}
    check_inside(workdir, names | {f"learners/{m}": True for m in range(experiment.max_learners)})


def saved_bytes(experiment: Experiment, assembly: Assembly) -> dict[str, int]:
    """By folder of the workdir, the bytes that the run saves there at least.

    These are a checkpoint of the parameters in float32, one snapshot of the whole state and one export if any
    are made, and a version of each fragment. What a loop's state takes only it knows.
    """
    e, params = experiment, 4 * assembly.num_params
    baseline = e.algorithm in BASELINES
    outer = 0 if baseline else outer_bytes(e, assembly.layout)
    found = {CHECKPOINTS: params}
    if e.snapshot.every:
        learners = 1 if baseline else e.sync.num_learners
        found[SNAPSHOTS] = learners * (params + inner_bytes(e)) + (0 if baseline else params + outer)
    if e.driver != "virtual" and not baseline:
        found[DURABLE] = params + outer
    if e.export.every:
        found["export"] = params
    return found


def check_room(experiment: Experiment, assembly: Assembly, workdir: pathlib.Path) -> None:
    """Raises ConfigError if the disk has less room than what the run saves on it."""
    saved, (_, available) = saved_bytes(experiment, assembly), free_bytes(workdir)
    needed = sum(saved.values())
    if needed > available:
        each = ", ".join(f"{formatting.size(size)} of {name}" for name, size in saved.items())
        raise ConfigError(
            f"workdir: {workdir}: has {formatting.size(available)} ({available:,} bytes) free, but the "
            f"run saves {formatting.size(needed)} ({needed:,} bytes) there: {each}"
        )
