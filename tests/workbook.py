"""Tapes of runs without arrays, as a small fleet in virtual time writes them."""

import dataclasses
import pathlib
import random
from collections.abc import Sequence

from ddiloco.disk.tape.header import Header, Machine
from ddiloco.disk.tape.recorder import FOLDER, LearnerTape, SyncerTape, learner_tape, syncer_tape
from ddiloco.outer.encoding import Traffic
from ddiloco.protocol import actions
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.virtual.fleet import Fleet
from ddiloco.virtual.learner_process import Place
from ddiloco.virtual.links import Link, LinkQuality
from ddiloco.virtual.lives import Change
from ddiloco.virtual.ports import CountingLearner, CountingSyncer, Observer

MACHINE = Machine("cpu", ("cpu",), {}, 1, "", {})
POLICY = SyncPolicy(num_learners=3, num_fragments=2, interval=6, quorum=1, overlap=2, silence_timeout=20.0)


class Taped(Observer):
    """Writes the tapes of a fleet; the SHA-256 of every version is zeros."""

    def __init__(self, workdir: pathlib.Path, policy: SyncPolicy):
        self._folder = workdir / FOLDER
        self._policy = policy
        self._learners = {}
        self._processes = 0
        self.rounds = []
        self.begin_syncer(SyncerState.initial(policy.num_fragments))

    def begin_syncer(self, state):
        """The tape of the syncer's next process; the one before was killed."""
        self._processes += 1
        header = self._header("syncer", None, self._processes)
        sha256 = ("00" * 32,) * self._policy.num_fragments
        header = dataclasses.replace(header, state=state, sha256=sha256, lineage=self._processes - 1)
        self.syncer = SyncerTape(syncer_tape(self._folder, self._processes), header)

    def syncer_handled(self, event, out, now):
        self.syncer.heard(event, out, now)
        for action in out:
            if isinstance(action, actions.Record) and action.name == "round":
                self.rounds.append(dict(action.values))
                self.syncer.committed(action.values["fragment"], action.values["version"], bytes(32))

    def learner_handled(self, learner, event, out, now):
        key = learner.number, learner.process
        if key not in self._learners:
            path = learner_tape(self._folder, *key)
            self._learners[key] = LearnerTape(*key, path, self._header("learner", *key))
        self._learners[key].heard(event, now)
        if any(isinstance(action, actions.AdoptAll) for action in out):
            self._learners[key].adopted(fresh=True, origin=None)

    def end(self, versions):
        """Closes the tapes."""
        for tape in self._learners.values():
            tape.close()
        self.syncer.end(versions)

    @staticmethod
    def _header(role, learner, process):
        return Header(role, learner, process, "virtual", "c0", "1a", MACHINE, 0.0, 0.0)


def fleet_tapes(
    workdir: pathlib.Path,
    policy: SyncPolicy = POLICY,
    steps: int = 40,
    changes: Sequence[Change] = (),
    crashes: Sequence[float] = (),
) -> Taped:
    """Plays a fleet whose learners step in 1, 1.3 and 1.6 s over links of 0.05 s, and writes its tapes.

    An offer takes 0.1 s more on its way up. `crashes`: when the syncer is killed, in seconds; it is back 1.5
    seconds later.
    """
    taped = Taped(workdir, policy)

    def link(name):
        return Link(LinkQuality(latency=0.05, bandwidth=1e3), random.Random(name))

    places = {
        m: Place(lambda m=m: 1.0 + 0.3 * m, link(f"up {m}"), link(f"down {m}"))
        for m in range(policy.num_learners)
    }
    fleet = Fleet(
        policy,
        steps,
        places,
        lambda learner: CountingLearner(10),
        CountingSyncer(
            Traffic((0,) * policy.num_fragments, (100,) * policy.num_fragments, (0,) * policy.num_fragments)
        ),
        merge_time=lambda: 0.2,
        notice_seconds=1.0,
        recovery_seconds=2.0,
        observer=taped,
    )
    fleet.live(changes)

    def restart():
        fleet.syncer.restart()
        taped.begin_syncer(fleet.syncer.durable)

    for at in crashes:
        fleet.calendar.at(at, fleet.syncer.crash)
        fleet.calendar.at(at + 1.5, restart)
    fleet.run(max_events=100_000)
    taped.end(fleet.syncer.durable.versions)
    return taped


def lose(learner: int, at: float, back: float) -> tuple[Change, ...]:
    """A learner dies, and is back."""
    return Change(at, learner, "fail"), Change(back, learner, "recover")
