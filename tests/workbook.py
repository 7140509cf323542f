"""Tapes of runs without arrays, as a small fleet in virtual time writes them."""

import dataclasses
import functools
import pathlib
import random
from collections.abc import Sequence

from ddiloco.protocol import actions, events, news
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.tape.header import Header, Machine
from ddiloco.storage.tape.recorder import (
    FOLDER,
    LearnerTape,
    SyncerTape,
    learner_tape,
    next_syncer,
    part_tape,
    syncer_tape,
)
from ddiloco.virtual.array_ports import Observer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.links import LinkQuality
from ddiloco.virtual.syncer_process import VirtualSyncer
from tests.parted_syncer import PartedSyncer
from tests.virtual.small_fleet import small_fleet

MACHINE = Machine("cpu", ("cpu",), {}, 1, "", {})
POLICY = SyncPolicy(num_learners=3, num_fragments=2, interval=6, quorum=1, overlap=2, silence_timeout=20.0)


class Taped(Observer):
    """Writes the tapes of a fleet; the SHA-256 of every version is zeros.

    Attributes:
      rounds: that were merged, as recorded.
      made: step, fragment and version of every merge that was committed.
    """

    def __init__(self, workdir: pathlib.Path, policy: SyncPolicy, parts: int = 1):
        self.folder = workdir / FOLDER
        self._policy = policy
        self._learners = {}
        self._processes = 0
        self.rounds, self.made = [], []
        self.syncer = SyncerTape()
        if parts == 1:
            self.begin_syncer(SyncerState.initial(policy.num_fragments))

    def begin_syncer(self, state):
        """The tape of the syncer's next process; the one before was killed."""
        self._processes += 1
        header = header_of("syncer", None, self._processes)
        sha256 = ("00" * 32,) * self._policy.num_fragments
        header = dataclasses.replace(header, state=state, sha256=sha256, lineage=self._processes - 1)
        self.syncer = SyncerTape(syncer_tape(self.folder, self._processes), header)

    def syncer_handled(self, event, out, now, shard=0):
        self.syncer.heard(event, out, now)
        for action in out:
            if isinstance(action, actions.Record) and action.name == "round":
                self.rounds.append(dict(action.values))
                self.syncer.committed(action.values["fragment"], action.values["version"], bytes(32))

    def merged(self, action, left_out, now):
        self.made.append((action.round.step, action.round.fragment, action.version))

    def learner_handled(self, learner, event, out, now):
        key = learner.number, learner.process
        if key not in self._learners:
            path = learner_tape(self.folder, *key)
            self._learners[key] = LearnerTape(*key, path, header_of("learner", *key))
        self._learners[key].heard(event, now)
        if any(isinstance(action, actions.AdoptAll) for action in out):
            self._learners[key].adopted(fresh=True, origin=None)

    def end(self, versions):
        """Closes the tapes."""
        for tape in self._learners.values():
            tape.close()
        self.syncer.end(versions)


def header_of(role, learner, process):
    """A header without what only some roles have."""
    return Header(role, learner, process, "virtual", "c0", "1a", MACHINE, 0.0, 0.0)


class TapedParts(PartedSyncer):
    """A syncer of several processes, each of which keeps a tape."""

    def __init__(self, *of_fleet, parts, taped):
        self._taped, self._open, self._lineages, self._count = taped, {}, {}, parts
        super().__init__(*of_fleet, parts=parts, rng=random.Random("parts"))

    def crash(self, whole=False):
        before = [process for process in self._everyone if process.core is not None]
        super().crash(whole)
        for process in before:
            if process.core is None:
                self._open.pop(process.number).close()

    def restart(self):
        begun = [process for process in self._everyone if process.core is None and process.alarm is not None]
        number = next_syncer(self._taped.folder)
        for lineage, process in enumerate(begun, start=self._starts + 1):
            of_part = process.number >= 0
            header = header_of("part" if of_part else "authority", None, number)
            own = fragments_of(process.number, self._count, len(self.versions)) if of_part else ()
            path = part_tape(self._taped.folder, process.number, number)
            self._lineages[process.number] = lineage
            header = dataclasses.replace(
                header,
                state=self.durable,
                sha256=("00" * 32,) * len(own),
                part=max(0, process.number),
                parts=self._count,
                lineage=lineage if of_part else 0,
            )
            self._open[process.number] = SyncerTape(
                path if of_part else syncer_tape(self._taped.folder, number), header
            )
        super().restart()
        for process in begun:
            if process.number >= 0:
                assert process.core.lineage == self._lineages[process.number]

    @property
    def _everyone(self):
        return [*self._parts, self._authority]

    def _decide(self, process, event):
        said = super()._decide(process, event)
        tape = self._open[process.number]
        tape.heard(event, said, self._calendar.now)
        if isinstance(event, events.MergeFinished):
            for word in said:
                if isinstance(word, news.Committed):
                    tape.committed(event.round.fragment, word.version, bytes(32))
        return said

    def end(self):
        """Closes the tapes."""
        for number, tape in self._open.items():
            own = fragments_of(number, self._count, len(self.versions)) if number >= 0 else ()
            tape.end([self.versions[p] for p in own])


def fleet_tapes(
    workdir: pathlib.Path,
    policy: SyncPolicy = POLICY,
    steps: int = 40,
    changes: Sequence[Change] = (),
    crashes: Sequence[float] = (),
    parts: int = 1,
    left_out: Sequence[int] = (),
) -> Taped:
    """Plays a fleet whose learners step in 1, 1.3 and 1.6 s over links of 0.05 s, and writes its tapes.

    A fragment takes 0.1 s more on its way. `crashes`: when the syncer is killed, in seconds; it is back 1.5
    seconds later. If it has several `parts`, one of its processes is killed, or all. `left_out`: learners
    whose offers are in no merge.
    """
    taped = Taped(workdir, policy, parts)
    fleet, _ = small_fleet(
        policy,
        steps,
        seconds=[1.0 + 0.3 * m for m in range(policy.num_learners)],
        quality=LinkQuality(latency=0.05, bandwidth=1e3),
        changes=changes,
        sizes=(100,) * policy.num_fragments,
        merge_seconds=0.2,
        notice=1.0,
        recovery=2.0,
        left_out=left_out,
        observer=taped,
        make_syncer=VirtualSyncer if parts == 1 else functools.partial(TapedParts, parts=parts, taped=taped),
    )

    def restart():
        fleet.syncer.restart()
        if parts == 1:
            taped.begin_syncer(fleet.syncer.durable)

    for at in crashes:
        fleet.calendar.at(at, fleet.syncer.crash)
        fleet.calendar.at(at + 1.5, restart)
    fleet.run(max_events=100_000)
    if parts > 1:
        fleet.syncer.end()
    taped.end(fleet.syncer.durable.versions)
    return taped


def lose(learner: int, at: float, back: float) -> tuple[Change, ...]:
    """A learner dies, and is back."""
    return Change(at, learner, "fail"), Change(back, learner, "recover")
