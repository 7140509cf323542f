"""Runs of threads that take snapshots, are stopped, and go on."""

import dataclasses
import itertools
import threading
from typing import Any
from unittest import mock

from ddiloco.local.run import LocalRun
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.learner_state import of_all_hosts
from ddiloco.storage.snapshots import Snapshot, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.workers.run_result import Outcome
from tests.workbench import devices, experiment

LIMIT = 120.0


EVERY = 8


STEP_TIME = 0.03


@dataclasses.dataclass
class Ran:
    """A run that is over."""

    outcome: Outcome
    records: list[Any]

    def noted(self, name):
        return [r.values for r in self.records if isinstance(r, records.Noted) and r.name == name]

    def steps(self, learner):
        return [r for r in self.records if isinstance(r, records.StepDone) and r.learner == learner]

    @property
    def contributions(self):
        """(learner, incarnation, version, step, steps, tokens) with the fragment, of all merges in order."""
        return [
            (values["fragment"], *contribution)
            for values in self.noted("round")
            for contribution in values["contributions"]
        ]


def settings(data_dir, learners=2, **groups):
    groups.setdefault("sync", {})
    groups["sync"] = {"quorum": None, "max_run_ahead": 2, **groups["sync"], "num_learners": learners}
    train = {"steps": 1000, "min_step_seconds": (STEP_TIME,) * learners, **groups.pop("train", {})}
    return experiment(
        data_dir,
        "streaming",
        train=train,
        snapshot={"every": EVERY, **groups.pop("snapshot", {})},
        tape={"enabled": False},
        **groups,
    )


def run(e, workdir, until=None, around=lambda learner, batches: batches, count=1):
    """A LocalRun to its end; `until(record)` stops it."""
    taken, stop = [], threading.Event()

    def record(told):
        taken.append(told)
        if until is not None and until(told):
            stop.set()

    with devices(count):
        assembly = assembly_of(e)
        equip = assembly.equipment

        def equipment():
            made = equip()
            return [dataclasses.replace(p, batches=around(m, p.batches)) for m, p in enumerate(made)]

        with mock.patch.object(assembly, "equipment", equipment):
            made = LocalRun(assembly, record, stop, workdir)
        outcomes = []
        thread = threading.Thread(target=lambda: outcomes.append(made.run()), daemon=True)
        thread.start()
        thread.join(LIMIT)
        assert not thread.is_alive(), "the run did not end"
    assert outcomes[0].failure is None
    return Ran(outcomes[0], taken)


def completed(count):
    """Holds once so many snapshots are complete, or given up."""
    seen = itertools.count(1)
    return lambda r: isinstance(r, records.Noted) and r.name.startswith("snapshot") and next(seen) >= count


def newest(workdir) -> Snapshot:
    store = SnapshotStore(workdir / "snapshots", 2)
    return store.open(max(int(path.parent.name) for path in store.folder.glob("*/snapshot.json")))


def state_of(snapshot, learner):
    return of_all_hosts(snapshot.folder / "learners" / str(learner))
