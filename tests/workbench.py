"""The smallest experiments that train, and runs of them with all that they recorded."""

import collections
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np

from ddiloco.data.settings import ImagesConfig
from ddiloco.data.sources import open_images, open_text
from ddiloco.local import run as local
from ddiloco.settings.experiment import Experiment, parse
from ddiloco.telemetry import records
from ddiloco.telemetry.state import RunState
from ddiloco.training.parameters import num_parameters
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.run_result import Outcome

SMALLEST = {
    "model": {
        "num_layers": 1,
        "model_dim": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "mlp_dim": 32,
        "compute_dtype": "float32",
    },
    "data": {"train_split": "train[:60]", "sequence_length": 32},
    "train": {"steps": 12, "batch_size": 2},
    "inner": {"warmup_steps": 2},
    "sync": {"num_learners": 2, "num_fragments": 3, "interval": 4},
    "eval": {"every": 0, "num_batches": 1, "batch_size": 4},
    "sample": {"tokens": 0},
    "log": {"page": ""},
}
POLICIES = {
    "decoupled": {},
    "streaming": {"quorum": None, "max_run_ahead": 2},
    "diloco": {"num_fragments": 1, "quorum": None, "overlap": 0, "max_run_ahead": 0},
}


def data_folder() -> str:
    """Where the embedded data sets are prepared, once for all tests."""
    folder = os.environ["TFDS_DATA_DIR"]
    open_text("stdlib_text", "train", folder)
    open_images(ImagesConfig(data_dir=folder), "train", 1)
    return folder


def experiment(data_dir: str, algorithm: str = "decoupled", **groups: Mapping[str, Any]) -> Experiment:
    """The smallest experiment, with some settings of some groups changed."""
    values: dict[str, Any] = {name: dict(group) for name, group in SMALLEST.items()}
    values["data"]["data_dir"] = data_dir
    values["sync"].update(POLICIES.get(algorithm, {}))
    alone = {"seed": 0, "driver": "local", "init_from": None}
    alone = {name: groups.pop(name, value) for name, value in alone.items()}
    for name, changes in groups.items():
        values.setdefault(name, {}).update(changes)
    return parse({**values, "algorithm": algorithm, **alone})


@contextlib.contextmanager
def devices(count: int) -> Iterator[None]:
    """Lets a run see only the first `count` devices."""
    first = jax.devices()[:count]
    with mock.patch.object(jax, "devices", lambda: first):
        yield


@dataclasses.dataclass
class Recorded:
    """A run that is over, with all that it recorded."""

    outcome: Outcome
    records: list[Any]
    experiment: Experiment

    def of(self, kind: type) -> list[Any]:
        """The records of a kind, in the order in which they came."""
        return [record for record in self.records if isinstance(record, kind)]

    def noted(self, name: str) -> list[Mapping[str, Any]]:
        """The values of the protocol's records of a name."""
        return [record.values for record in self.of(records.Noted) if record.name == name]


@dataclasses.dataclass
class Run(Recorded):
    """A LocalRun that is over."""

    drawn: collections.Counter  # tokens by learner

    @property
    def state(self) -> RunState:
        """What the records add up to."""
        e = self.experiment
        learners = range(e.sync.num_learners)
        info = records.RunInfo(
            algorithm=e.algorithm,
            num_learners=len(learners),
            num_params=num_parameters(e.model),
            num_fragments=e.sync.num_fragments,
            total_steps=e.train.steps,
            seed=e.seed,
            chips_by_learner=dict.fromkeys(learners, 1),
        )
        state = RunState(info)
        for record in self.records:
            state.apply(record)
        return state


class Around:
    """An iterator around a learner's batches, whose position is theirs."""

    def __init__(self, iterator: Iterator, batches: Any) -> None:
        self._iterator = iterator
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


def run_local(
    assembly: Assembly,
    *,
    around: Callable[[int, Iterator], Iterator] = lambda learner, batches: batches,
    stop: threading.Event | None = None,
    limit: float = 120.0,
) -> Run:
    """Runs a LocalRun to its end, which must come within `limit` seconds.

    `around` may put an iterator of its own around a learner's batches.
    """
    taken: list[Any] = []
    drawn: collections.Counter = collections.Counter()

    def counted(learner: int, batches: Iterator) -> Iterator:
        for batch in batches:
            drawn[learner] += int(batch["weights"].sum())
            yield batch

    equip = assembly.equipment

    def equipment() -> list:
        return [
            dataclasses.replace(parts, batches=Around(counted(m, around(m, parts.batches)), parts.batches))
            for m, parts in enumerate(equip())
        ]

    with mock.patch.object(assembly, "equipment", equipment):
        run = local.LocalRun(assembly, taken.append, stop or threading.Event())
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run.run()), daemon=True)
    thread.start()
    thread.join(limit)
    assert not thread.is_alive(), "the run did not end"
    return Run(outcomes[0], list(taken), assembly.experiment, drawn)


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """The same names, and the same numbers bit for bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
