"""Replays a recorded run from its tapes, all actors in one process, to the same parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.outer.global_model import parameters_sha256, pieces_sha256
from ddiloco.protocol.messages import RoundId
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import BASELINES, Experiment, parse
from ddiloco.storage.durable import FOLDER as SYNCER
from ddiloco.storage.durable import DurableState, DurableStateError
from ddiloco.storage.learner_state import numbered, of_all_hosts
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.storage.tape.file import TapeError
from ddiloco.storage.tape.header import Header, Machine
from ddiloco.storage.tape.recorder import BEGAN
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.learner_actor import UNUSABLE_POSITION
from ddiloco.workers.learner_arrays import Equipment, TrainingArrays
from ddiloco.workers.tapes import fingerprint, machine_of
from ddiloco.workers.transfer import host_arrays
from experiments.studies.replay import plan as plans
from experiments.studies.replay import works
from experiments.studies.replay.order import Uses, perform_all
from experiments.studies.replay.reading import RunTapes
from experiments.studies.replay.works import Actor, Key, ReplayPlan, ReplayWork, VersionId


class ReplayMismatch(Exception):
    """The replay got other numbers than the run; the message names the round and possible reasons."""


class Replayed(NamedTuple):
    """The result of a replay."""

    params: dict[str, np.ndarray]  # the global model
    step: int  # its newest global step
    merges: int  # how many were done again
    compared: int  # how many of them were compared with their SHA-256 on the tape
    steps: int  # how many inner steps were done again

    @property
    def sha256(self) -> str:
        """`params_sha256`, as in summary.json."""
        return parameters_sha256(self.params)


def recorded_experiment(workdir: pathlib.Path) -> Experiment:
    """The settings of a run; raises TapeError if unreadable, or a baseline's, which keeps no tapes."""
    path = workdir / "config.json"
    try:
        experiment = parse(json.loads(path.read_text()))
    except OSError as error:
        raise TapeError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TapeError(f"{path}: cannot be used: {error}") from None
    if experiment.algorithm in BASELINES:
        raise TapeError(
            f"{workdir}: is of {experiment.algorithm}, which needs no tape: run it again by its seed"
        )
    return experiment


def make_plan(experiment: Experiment, tapes: RunTapes) -> ReplayPlan:
    """What the actors did under these settings. Raises TapeError if the tapes do not fit them."""
    wanted = fingerprint(experiment)
    for tape in [*tapes.syncers, *(t for lives in tapes.learners.values() for t in lives)]:
        if tape.header.config != wanted:
            raise TapeError(f"{tape.path}: is of other settings than config.json")
    return plans.make_plan(tapes, experiment.sync, experiment.train.steps)


class Replay:
    """Replays all of a plan, or all rounds up to `until`.

    To make it and to run it may raise
      TapeError: something that an actor needs is on no tape, or the layouts differ;
      ReplayMismatch: a batch or a version differs from the run's.
    """

    def __init__(
        self,
        assembly: Assembly,
        plan: ReplayPlan,
        until: RoundId | None = None,
        progress: Callable[[works.MergeWork], None] = lambda merge: None,
    ) -> None:
        plan = plans.without_needless(plan)
        self._assembly, self._plan, self._progress = assembly, plan, progress
        self._uses = Uses(plan.actors)
        returns = [w for actor in plan.learners for w in actor.works if isinstance(w, works.Return)]
        self._whole = {work.origin for work in returns} | {*plan.began}
        self._model = assembly.global_model(assembly.initial_parameters())
        if any(plan.begins.values()):
            self._restore_model()
        self._things: dict[Key, Any] = {key: self._given(key) for key in plan.given}
        self._equipment = _equipment(assembly, plan)
        self._learners: dict[int, TrainingArrays] = {}  # by the actor's id
        self._guards = {id(actor): self._model.new_guard() for actor in plan.syncers}
        self._until = None if until is None else _merges_until(plan, until)
        self._merges = self._compared = self._steps = self._step = 0
        for tape in (actor.tape for actor in plan.actors):
            if tape.header.layout != assembly.layout.fingerprint:
                raise TapeError(f"{tape.path}: is of another layout of fragments")

    def _restore_model(self) -> None:
        """Loads the versions that the run resumed from, which are saved with its tapes."""
        header, path = self._plan.first.header, self._plan.first.path
        folder, layout = path.parent / BEGAN / SYNCER, self._assembly.layout
        try:
            durable = DurableState(folder, layout, lambda record: None, threading.Event(), header.run)
            durable.restore(self._model)
        except (DurableStateError, OSError) as error:
            raise TapeError(f"{path}: goes on with what cannot be read: {error}") from None

    def _given(self, key: Key) -> Any:
        """Something that exists from the start; the first tape must begin with it too."""
        tape = self._plan.first
        if isinstance(key, InnerOrigin):
            try:
                state = of_all_hosts(self._plan.began[key])
            except (OSError, ValueError) as error:
                raise TapeError(f"{tape.path}: {key} cannot be read: {error}") from None
            return dict(state.arrays), {"steps": state.header.steps}
        version, pieces = self._model.fragment(key.fragment)
        if version != key.version:
            raise TapeError(f"{tape.path}: begins at {key}, not at {version}: the tape before it is missing")
        return pieces

    def run(self) -> Replayed:
        """Does all of it again."""
        perform_all(self._plan, self._do, lambda: self._until is not None and not self._until)
        return Replayed(self._model.parameters(), self._step, self._merges, self._compared, self._steps)

    def _do(self, actor: Actor, work: ReplayWork) -> None:
        if isinstance(work, works.MergeWork):
            self._merge(actor, work)
        elif actor.tape.header.learner is not None:
            self._on_learner(actor, work)
        for key in self._uses.done(work):
            self._things.pop(key, None)
        if actor.works[-1] is work:
            self._learners.pop(id(actor), None)

    def _on_learner(self, actor: Actor, work: ReplayWork) -> None:
        arrays = self._learners.get(id(actor)) or self._begin(actor)
        match work:
            case works.Return(origin=origin):
                kept, values = self._things[origin]
                arrays.restore(kept, {**values, "position": actor.tape.header.position})
            case works.Adopt():
                fragments = [self._things[key] for key in work.fragments]
                inner = None if work.inner is None else self._things[work.inner]
                if work.inner in self._whole:
                    inner = numbered("inner", inner[0])
                arrays.adopt(fragments, inner)
            case works.SetPosition(position=position):
                with contextlib.suppress(*UNUSABLE_POSITION):  # the run went on where it was, too
                    arrays.draw_from(position)
            case works.Step():
                tokens, _ = arrays.step(work.clock)
                self._steps += 1
                if tokens != work.tokens:
                    raise ReplayMismatch(
                        f"{actor.name}, step {work.clock + 1}: its batch has {tokens} tokens, and had "
                        f"{work.tokens} in the run: the data are not the same"
                    )
            case works.OfferWork(id=key):
                self._things[key] = offer = arrays.offer(key.fragment, key.steps)
                jax.block_until_ready((offer.arrays, offer.residual, offer.own))
            case works.Apply(update=update, steps=steps):
                arrays.apply(update.fragment, work.mixing, self._things[update], steps, work.rebase)
            case works.Give(origin=origin) if origin in self._whole:
                kept, values = arrays.state()
                self._things[origin] = {name: np.asarray(one) for name, one in kept.items()}, values
            case works.Give(origin=origin):
                self._things[origin] = host_arrays(arrays.inner())
        # Here learners share devices, which take up programs in any order: two could wait for each other.
        jax.block_until_ready(arrays.params)

    def _begin(self, actor: Actor) -> TrainingArrays:
        header = actor.tape.header
        batches = self._assembly.batches((header.learner,))
        if header.position is not None:
            batches.set_state(dict(header.position))
        own = self._equipment[_devices_of(header)]
        equipment = dataclasses.replace(own, batches=batches, verify_every=0)
        return self._learners.setdefault(id(actor), TrainingArrays(equipment))

    def _merge(self, actor: Actor, work: works.MergeWork) -> None:
        p = work.round.fragment
        given = [self._model.read(p, self._things[key].on_host(), c.learner) for c, key in work.given]
        self._model.guard = self._guards[id(actor)]
        counts, learners = [(c.steps, c.tokens) for c, _ in work.given], [c.learner for c, _ in work.given]
        made = self._model.merge(p, given, counts, learners, work.interval)
        self._merges += 1
        if self._until is not None:
            self._until.discard((id(actor), work.number))
        if made.empty or work.empty:
            if made.empty is not work.empty:
                raise ReplayMismatch(self._mismatch(actor, work))
            return
        pieces = made.pieces
        self._step = max(self._step, work.round.step)
        if work.sha256 is not None:
            self._compared += 1
            if pieces_sha256(pieces) != work.sha256:
                raise ReplayMismatch(self._mismatch(actor, work))
        key = VersionId(p, work.version)
        if self._uses.wanted(key):
            self._things[key] = pieces
        self._progress(work)

    def _mismatch(self, actor: Actor, work: works.MergeWork) -> str:
        learners = sorted({key.learner for key in work.needs})
        text = (
            f"round {work.round.step}, fragment {work.round.fragment}: version {work.version}, merged of "
            f"learners {', '.join(map(str, learners))}, is not the one of the run"
        )
        used = set(work.needs)
        makers = [lr.tape.header for lr in self._plan.learners if used & {w.makes for w in lr.works}]
        for header in (actor.tape.header, *makers):
            mesh = None if header.learner is None else self._equipment[_devices_of(header)].program.mesh
            found = differences(header.machine, machine_of(mesh))
            if found:
                return f"{text}; {header.actor} had {', '.join(found)}"
        return (
            f"{text}; platform, devices and packages are the same: the code or the data differ, or a device "
            "erred (config.train.verify_every finds one that does)"
        )


def _devices_of(header: Header) -> tuple[int | None, int, int]:
    """What a learner's equipment depends on: its number, its share of its hosts and, if not all, devices."""
    return header.learner, header.share, header.machine.visible if header.share > 1 else 0


def _equipment(assembly: Assembly, plan: ReplayPlan) -> dict[tuple[int | None, int, int], Equipment]:
    """Each learner's equipment, by `_devices_of` its tapes."""
    wanted = sorted({_devices_of(actor.tape.header) for actor in plan.learners})
    if plan.first.header.driver != "remote":
        equipment = assembly.equipment()
        return {(m, *rest): equipment[m] for m, *rest in wanted}
    made: dict[tuple[int | None, int, int], Equipment] = {}
    by_kind: dict[Hashable, tuple[Assembly, Equipment]] = {}
    for m, share, devices in wanted:
        kind = assembly.recipe.kind((m,)), share, devices
        if kind not in by_kind:
            alike = assembly if share == 1 else assembly_of(assembly.experiment, None, share, devices)
            by_kind[kind] = alike, alike.own_equipment(m)
        alike, equipment = by_kind[kind]
        made[m, share, devices] = alike.reassigned(equipment, m)
    return made


def _merges_until(plan: ReplayPlan, until: RoundId) -> set[tuple[int, int]]:
    """The merges of each process up to its last round that is not after `until`."""
    found: set[tuple[int, int]] = set()
    for actor, merges in zip(plan.syncers, plan.merges, strict=True):
        count = max((n for n, m in enumerate(merges, start=1) if m.round <= until), default=0)
        found |= {(id(actor), merge.number) for merge in merges[:count]}
    if not found:
        raise TapeError(f"{plan.first.path}: no round up to step {until.step} was merged")
    return found


def differences(then: Machine, here: Machine) -> list[str]:
    """What differs between two machines, as short phrases: "jax 0.9.0, here 0.10.2"."""
    ours, theirs = dataclasses.asdict(then), dataclasses.asdict(here)
    found = [
        f"{name} {_shown(ours[name])}, here {_shown(theirs[name])}"
        for name in ("platform", "devices", "mesh", "visible", "xla_flags", "threads")
        if ours[name] != theirs[name]
    ]
    names = sorted({*then.packages, *here.packages})
    found += [
        f"{name} {then.packages.get(name, 'unknown')}, here {here.packages.get(name, 'none')}"
        for name in names
        if then.packages.get(name) != here.packages.get(name)
    ]
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {size}" for name, size in value.items() if size > 1) or "of one device"
    if isinstance(value, tuple):
        return f"{len(value)} x {value[0]}" if len(set(value)) == 1 else ", ".join(value)
    return str(value) or "none"
