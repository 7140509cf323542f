"""Snapshots over a real wire: a checkpoint is asked for, and the answer comes after the records before it."""

from ddiloco.telemetry import records
from ddiloco.workers.exchange import CheckpointAsked, CheckpointWritten
from tests.remote.ends import joined


def test_a_learner_hears_that_a_checkpoint_is_asked_for_and_answers(ends):
    syncer, learner = ends
    joined(syncer, learner).deliver(CheckpointAsked(3))
    assert learner.next(CheckpointAsked).number == 3
    answers = [CheckpointWritten(0, 3, (7, 8)), CheckpointWritten(0, 4, (), "No space left on device")]
    for n, answer in enumerate(answers):
        learner.client.outbox.record(records.Alarm(f"before {n}", 1.0))
        learner.client.send_checkpoint_written(answer)
        assert syncer.next(CheckpointWritten) == answer
        assert f"learner 0: before {n}" in [
            one.sentence for one in syncer.records if isinstance(one, records.Alarm)
        ]
