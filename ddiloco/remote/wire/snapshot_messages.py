"""A learner's messages about snapshots as messages of the wire, and back."""

from __future__ import annotations

import json

from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import LONGEST_REASON, by_fragment
from ddiloco.remote.wire.validation import CHUNK_BYTES, WireError
from ddiloco.storage.snapshots.store import PartFiles
from ddiloco.workers.snapshots.messages import PartWritten, SnapshotMessage, StateRecorded


def snapshot_message(message: SnapshotMessage) -> pb.FromLearner:
    """The message of the wire for one about a snapshot, without the learner's number."""
    match message:
        case StateRecorded(_, incarnation, number, step, versions):
            state = pb.StateRecorded(
                snapshot=number,
                incarnation=incarnation,
                recorded=step is not None,
                step=step or 0,
                versions=versions,
            )
            return pb.FromLearner(state_recorded=state)
        case PartWritten():
            files = "" if message.files is None else json.dumps(message.files.to_json())
            problem = message.problem
            if len(files) > CHUNK_BYTES:
                files, problem = "", f"the part has {len(message.files.files)} files, too many to tell of"
            written = pb.PartWritten(snapshot=message.number, files=files, problem=problem[:LONGEST_REASON])
            return pb.FromLearner(part_written=written)


def told_of_snapshot(message: pb.FromLearner, learner: int, num_fragments: int) -> SnapshotMessage:
    """What a learner's message says about a snapshot.

    Raises:
      WireError: the message is about none, or has impossible values.
    """
    match message.WhichOneof("kind"):
        case "state_recorded":
            m = message.state_recorded
            if not m.recorded:
                return StateRecorded(learner, m.incarnation, m.snapshot, None)
            versions = tuple(by_fragment(m.versions, num_fragments))
            return StateRecorded(learner, m.incarnation, m.snapshot, m.step, versions)
        case "part_written":
            m = message.part_written
            if not m.files:
                return PartWritten(learner, m.snapshot, None, m.problem[:LONGEST_REASON] or "no reason given")
            try:
                return PartWritten(learner, m.snapshot, PartFiles.from_json(json.loads(m.files)))
            except (ValueError, RecursionError):
                raise WireError("malformed part") from None
        case kind:
            raise WireError("unexpected message", f"{kind or 'an empty one'} where a snapshot's must be")
