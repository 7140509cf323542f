"""A learner records its state at a step boundary, before it handles what was sent after the cut."""

import queue
import types

import numpy as np
import pytest

from ddiloco.outer.fragments import take
from ddiloco.protocol import events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.work import LearnerWork
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.snapshots.parts import learner_part, read_part
from ddiloco.storage.snapshots.store import PartWriter
from ddiloco.storage.tape.header import ResumedWith, SnapshotName
from ddiloco.workers.exchange import EventDelivery, Leave, SnapshotBegun
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.learner_worker import LearnerWorker
from ddiloco.workers.resuming import ResumedLearner
from ddiloco.workers.snapshots.messages import PartWritten, StateRecorded
from ddiloco.workers.snapshots.recording import LearnerRecording
from tests.workbench import devices, experiment

PATIENCE = 60.0
STEPS = 3  # after which it waits for what arrives


@pytest.fixture(scope="module")
def made(data_dir):
    with devices(1):
        assembly = assembly_of(experiment(data_dir))
        return assembly, assembly.own_equipment(0)


@pytest.fixture
def learner(made, tmp_path):
    """A learner that has taken its three steps, what it tells the syncer, and where its parts go."""
    assembly, compiled = made
    equipment = assembly.reassigned(compiled, 0)  # its batches from the beginning
    initial = assembly.initial_parameters()
    fragments = [take(assembly.layout, p, initial) for p in range(3)]
    told = queue.SimpleQueue()
    writer = PartWriter(tmp_path)
    core = LearnerCore(0, 1, SyncPolicy(num_learners=1, num_fragments=3, interval=24), STEPS)
    worker = LearnerWorker(
        core,
        equipment,
        lambda event, shard: told.put(event),
        types.SimpleNamespace(waiting=0, send=lambda *offer: None),
        lambda r: None,
        recording=LearnerRecording(0, writer, told.put),
    )
    worker.start()
    worker.inbox.put(EventDelivery(events.Welcomed(1, 0, (0, 0, 0), (0, 0, 0)), fragments))
    yield worker, told, tmp_path
    worker.inbox.put(Leave())
    assert worker.join(PATIENCE)
    writer.close(PATIENCE)


def next_of(told, kind):
    while not isinstance(message := told.get(timeout=PATIENCE), kind):
        pass
    return message


def done(told):
    """Waits for the report of the last step."""
    while next_of(told, events.StepReported).report.step < STEPS:
        pass


def written(told, folder, number=1):
    message = next_of(told, PartWritten)
    assert message.problem == ""
    return read_part(folder / f"{number:06d}" / learner_part(0), message.files)


def test_an_update_from_after_the_cut_is_in_no_part(learner, made):
    worker, told, folder = learner
    layout = made[0].layout
    done(told)
    update = [np.full(shape, 7.0, np.float32) for shape in layout.piece_shapes(1)]
    worker.inbox.put(EventDelivery(events.UpdateArrived(1, 1, 2), [update], epoch=1))
    recorded = next_of(told, StateRecorded)
    assert (recorded.number, recorded.versions[1]) == (1, 0)
    part = written(told, folder)
    assert part.state["fragments"][1][0] == 0
    name = layout.fragments[1][0].name
    assert not (part.arrays[f"params/{name}"] == 7.0).any()


def test_counters_position_and_arrays_are_those_of_the_last_step(learner):
    worker, told, folder = learner
    done(told)
    worker.inbox.put(SnapshotBegun(1, (0, 0, 0)))
    recorded = next_of(told, StateRecorded)
    assert (recorded.incarnation, recorded.step) == (1, STEPS)
    part = written(told, folder)
    assert part.state["position"]["batches"] == part.state["steps"] == STEPS
    assert [row[2] for row in part.state["fragments"]] == [STEPS] * 3
    assert part.state["tokens"] == worker.tokens


def test_a_learner_that_resumes_from_its_part_keeps_no_copy_of_it_in_host_memory(learner, made):
    worker, told, folder = learner
    done(told)
    worker.inbox.put(SnapshotBegun(1, (0, 0, 0)))
    part = written(told, folder)
    layout = made[0].layout
    updates = {1: [np.full(shape, 7.0, np.float32) for shape in layout.piece_shapes(1)]}
    begins_with = ResumedWith(LearnerWork(STEPS, 0, 0, ()), snapshot=SnapshotName(1, ""))
    resumed = ResumedLearner(begins_with, worker.tokens, STEPS, dict(part.arrays), part.state, updates)
    arrays = TrainingArrays(made[0].reassigned(made[1], 0))
    resumed.load(arrays, mixing=0.0)
    recorded = {name.removeprefix("params/"): array for name, array in part.arrays.items()}
    for own, then in zip(take(layout, 0, arrays.params), take(layout, 0, recorded), strict=True):
        np.testing.assert_array_equal(own, then)
    assert all((own == 7.0).all() for own in take(layout, 1, arrays.params))
    assert not resumed.arrays and not resumed.updates


def test_the_word_of_a_snapshot_that_was_recorded_already_changes_nothing(learner):
    worker, told, _ = learner
    done(told)
    for number in (1, 1, 2):
        worker.inbox.put(SnapshotBegun(number, (0, 0, 0)))
    assert next_of(told, StateRecorded).number == 1
    assert next_of(told, StateRecorded).number == 2


def test_a_learner_that_was_not_welcomed_yet_has_nothing_to_record():
    told = []
    core = LearnerCore(0, 1, SyncPolicy(num_learners=1, num_fragments=3, interval=24))
    recording = LearnerRecording(0, None, told.append)
    assert recording.sees(1)
    recording.record(core, dict, {})
    assert told == [StateRecorded(0, 1, 1, None)]
