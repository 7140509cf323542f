"""Tapes of runs without arrays, as a small fleet in virtual time writes them."""

import dataclasses
import pathlib
from collections.abc import Sequence

from ddiloco.protocol import actions
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
    syncer_tape,
)
from ddiloco.virtual.array_ports import Observer
from ddiloco.virtual.availability import Change
from ddiloco.virtual.links import LinkQuality
from tests.virtual.small_fleet import small_fleet

MACHINE = Machine("cpu", ("cpu",), {}, 1, "", {})
POLICY = SyncPolicy(num_learners=3, num_fragments=2, interval=6, quorum=1, overlap=2, silence_timeout=20.0)


class Taped(Observer):
    """Writes the tapes of a fleet; the SHA-256 of every version is zeros.

    Attributes:
      rounds: that were merged, as recorded.
      made: step, fragment and version of every merge that was committed.
    """

    def __init__(self, workdir: pathlib.Path, policy: SyncPolicy, shards: int = 1):
        self.folder = workdir / FOLDER
        self._policy, self._shards = policy, shards
        self._learners = {}
        self.rounds, self.made = [], []
        self.syncers = [SyncerTape() for _ in range(shards)]
        for shard in range(shards):
            self.begin_syncer(SyncerState.initial(policy.num_fragments), shard)

    def begin_syncer(self, state, shard=0, lineage=0):
        """The tape of a shard's next process; the one before was killed."""
        number = next_syncer(self.folder)
        header = header_of("syncer", None, number, self._shards)
        own = fragments_of(shard, self._shards, self._policy.num_fragments)
        begun = {"state": state, "sha256": ("00" * 32,) * len(own), "lineage": lineage, "shard": shard}
        header = dataclasses.replace(header, **begun)
        self.syncers[shard].close()
        self.syncers[shard] = SyncerTape(syncer_tape(self.folder, number, shard), header)

    def syncer_handled(self, event, out, now, shard=0):
        self.syncers[shard].heard(event, out, now)
        for action in out:
            if isinstance(action, actions.Record) and action.name == "round":
                self.rounds.append(dict(action.values))
                made = action.values["fragment"], action.values["version"]
                self.syncers[shard].committed(*made, bytes(32))

    def merged(self, action, left_out, now):
        self.made.append((action.round.step, action.round.fragment, action.version))

    def learner_handled(self, learner, event, out, now):
        key = learner.number, learner.process
        if key not in self._learners:
            path = learner_tape(self.folder, *key)
            self._learners[key] = LearnerTape(*key, path, header_of("learner", *key, self._shards))
        self._learners[key].heard(event, now)
        if any(isinstance(action, actions.AdoptAll) for action in out):
            self._learners[key].adopted(fresh=True, origin=None)

    def end(self, versions):
        """Closes the tapes."""
        for tape in self._learners.values():
            tape.close()
        for shard, tape in enumerate(self.syncers):
            tape.end([versions[p] for p in fragments_of(shard, self._shards, len(versions))])


def header_of(role, learner, process, shards=1):
    """A header without what only some roles have."""
    return Header(role, learner, process, "virtual", "c0", "1a", MACHINE, 0.0, 0.0, shards=shards)


def fleet_tapes(
    workdir: pathlib.Path,
    policy: SyncPolicy = POLICY,
    steps: int = 40,
    changes: Sequence[Change] = (),
    crashes: Sequence[float] = (),
    shards: int = 1,
    left_out: Sequence[int] = (),
) -> Taped:
    """Plays a fleet whose learners step in 1, 1.3 and 1.6 s over links of 0.05 s, and writes its tapes.

    A fragment takes 0.1 s more on its way. `crashes`: when the syncer is killed, in seconds; it is back 1.5
    seconds later. If it has several `shards`, these are killed in turn. `left_out`: learners whose offers are
    in no merge.
    """
    taped = Taped(workdir, policy, shards)
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
        shards=shards,
    )

    def restart(shard):
        syncer = fleet.syncers[shard]
        if syncer.core is None:
            syncer.restart()
            taped.begin_syncer(syncer.durable, shard, syncer.lineage)

    for number, at in enumerate(sorted(crashes)):
        shard = number % shards
        fleet.calendar.at(at, fleet.syncers[shard].crash)
        fleet.calendar.at(at + 1.5, restart, shard)
    fleet.run(max_events=100_000)
    merged = [fleet.syncers[p % shards].durable.versions[p] for p in range(policy.num_fragments)]
    taped.end(merged)
    return taped


def lose(learner: int, at: float, back: float) -> tuple[Change, ...]:
    """A learner dies, and is back."""
    return Change(at, learner, "fail"), Change(back, learner, "recover")
