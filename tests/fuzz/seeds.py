"""Sound bytes for each target, from which others are made."""

import json
import pathlib
import struct
import tempfile
import zlib

from ddiloco.arrays.blocks import Cut
from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message
from ddiloco.remote.wire.event_messages import from_learner as learner_message
from ddiloco.remote.wire.event_messages import (
    from_syncer,
    up_header,
)
from ddiloco.remote.wire.record_messages import record_message
from ddiloco.storage.tape import file as tape_file
from ddiloco.storage.tape.header import Header
from ddiloco.storage.tape.recorder import LearnerTape, learner_tape
from ddiloco.telemetry import records
from tests.fuzz import rpcs
from tests.fuzz.targets import BYTES, FOLDER, INNER, MAGIC
from tests.remote.ends import greeting
from tests.workbook import MACHINE


def headed(message, payload=b""):
    """What `cut` takes apart again."""
    encoded = message.SerializeToString()
    return bytes([len(encoded)]) + encoded + payload


def array_body(header, payload=b""):
    """What follows the magic of a file of arrays."""
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + payload


def conversation():
    """Learners that join, are welcomed, report and offer."""
    said = [events.LearnerJoined(0, 5), events.LearnerJoined(1, 5), events.LearnerReady(0, 5, 0, (0, 0))]
    said += [events.StepReported(Report(0, 5, step, (FragmentCounters(0, step, 9),) * 2)) for step in (1, 4)]
    said += [events.LearnerJoined(1, 6, 3, (1, 2)), events.OfferFailed(RoundId(2, 0), 0, 5, "x")]
    offered = up_header(RoundId(2, 0), Contribution(0, 5, 0, 0, 4, 4, 9), 3)
    payloads = [learner_message(event).SerializeToString() for event in said]
    for at in range(3, 4 * len(payloads) // 3, 4):
        payloads.insert(at, offered.SerializeToString())
    return payloads


def recorded_tape():
    """The records of a tape, as they are before they are compressed."""
    made = learner_tape(pathlib.Path(tempfile.mkdtemp(dir=FOLDER)), 3, 7)
    tape = LearnerTape(3, 7, made, Header("learner", 3, 7, "local", "c0", "1a", MACHINE, 1.0, 2.0))
    report = Report(3, 7, 3, (FragmentCounters(1, 2, 9),) * 2)
    for event in (events.StepStarted(10), events.StepFinished(), events.StepReported(report)):
        tape.heard(event, 1.5)
    tape.end()
    return [zlib.decompress(record.payload) for record in tape_file.read(made).records]


def shards_records():
    """What a shard of a syncer sends to the first."""
    noted = record_message(records.Noted("round", {"fragment": 0}, 5.0))
    moved = record_message(records.Transferred(1, 2, 3))
    yield pb.FromShard(records=pb.Records(first=0, records=[noted, moved])).SerializeToString()


TOKENS = {
    "name": "stdlib_text",
    "text_feature": "text",
    "tokenizer": "byte",
    "full_name": "stdlib_text",
    "dtype": "<u2",
    "splits": {"train": {"files": ["0"], "documents": 3, "tokens": 9}},
}
RECORDS = [
    record_message(records.StepDone(3, 1, 2.0, 3, {"loss": 1.0})),
    record_message(records.StateChanged(3, State.STARTING, 2.0)),
    record_message(records.Noted("drop", {"learner": 3, "reason": "x"}, 2.0)),
    record_message(records.Noted("recovered", {"bytes": 1}, 2.0)),
    record_message(records.LearnerDied(3, 2.0, "x")),
    record_message(records.Alarm("x", 2.0)),
]
SEEDS = {  # sound bytes, from which others are made
    "from_learner": [
        learner_message(events.StepReported(Report(3, 5, 3, (FragmentCounters(1, 2, 9),) * 3))),
        learner_message(events.LearnerJoined(3, 5)),
        learner_message(events.LearnerJoined(3, 5, 3, (1, 2, 3))),
        learner_message(events.LearnerReady(3, 5, 3, (1, 2, 3))),
        learner_message(events.LearnerLost(3, 5, "x")),
        learner_message(events.OfferFailed(RoundId(2, 0), 3, 5, "x")),
        pb.FromLearner(records=pb.Records(first=0, records=RECORDS)),
    ],
    "core": [rpcs.joint(*conversation())],
    "to_learner": [
        from_syncer(events.ClockSet(5)),
        from_syncer(events.OfferAsked(RoundId(4, 2), 1, 3)),
        from_syncer(events.NotMember(5)),
        from_syncer(events.Rejected(5, "x")),
        from_syncer(events.TimingSet(12, 2, 1, 0.8, 1.0, "x")),
    ],
    "record": RECORDS,
    "offer": [headed(up_header(RoundId(4, 1), Contribution(3, 5, 1, 0, 4, 4, 9), BYTES), bytes(BYTES))],
    "update": [
        headed(
            pb.DownHeader(
                update={"fragment": 1, "version": 3, "watermark": {"steps": 4}}, size=BYTES, welcome=2
            ),
            bytes(BYTES),
        )
    ],
    "blocks": [
        cut_message(Cut((3,), (((0, 1),), ((1, 3),)))),
        cut_message(Cut((1, 3), (((0, 1), (0, 3)),))),
        pb.Cut(shape=[3], count=4096, bounds=[0, 3] * 4096),
    ],
    "donation": [
        headed(
            pb.DonationHeader(
                format=INNER.fingerprint,
                versions=[1, 2],
                size=16,
                arrays=map(cut_message, INNER.needs),
                hosts=["127.0.0.1:7071"],
            ),
            bytes(16),
        )
    ],
    "donation_request": [pb.DonationRequest(versions=[1, 2, 3])],
    "peers": [pb.Peers(addresses=["127.0.0.1:7070"])],
    "array_files": [
        array_body({"version": 1, "arrays": [["<f4", [2]]]}, bytes(8)),
        array_body({"arrays": [["<f4", [1 << 40, 1 << 20]]]}),
        array_body({"arrays": [["<f4", [-1, -2]], ["O", [1]], [["a"], 3]]}),
    ],
    "torn_files": [MAGIC + bytes(40)],
    "durable_values": [b'{"0": 3, "sha256": "x"}', b'{"a": {"b": [1.0, null]}}'],
    "run_mark": [b'{"run": "5f", "start": "00"}'],
    "snapshot": [
        b'{"run": "5f", "step": 3, "time": 1.0, "learners": [0], "experiment": {}, "files": {"syncer/x": 3}}'
    ],
    "scores": [
        b'{"run": "5f", "step": 3, "tokens": 9, "time": 1.0}\n',
        b'{"run": "5f", "ask": "x", "step": 3, "tokens": 9, "versions": [1, 2]}',
    ],
    "tokenized": [json.dumps(TOKENS).encode(), json.dumps({**TOKENS, "splits": {}}).encode()],
    "model_config": [
        b'{"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"rope_type": "x"}, "head_dim": 16}',
        b'{"architectures": "Qwen3ForCausalLM", "rope_parameters": null}',
        b'{"rope_scaling": [1]}',
    ],
    "model_weights": [b'{"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}}'],
    "weights_index": [b'{"weight_map": {"a": "model.safetensors"}}'],
    "tokens": [b"a token that all share\n", b"0 a-token-of-its-own\n1 another-of-its-own\n"],
    "tape": [rpcs.joint(*recorded_tape())],
    "torn_tape": [b"ddiloco tape 3\n" + bytes(12)],
    "rpc": [
        rpcs.said("control", greeting(learner=1)),
        rpcs.said("greeted", learner_message(events.LearnerJoined(1, 100)).SerializeToString()),
        rpcs.said("offers", *rpcs.sound_offer()),
        rpcs.said("peers", b""),
        rpcs.said("updates"),
        rpcs.said("updates", b"a session"),
        rpcs.said("donation", rpcs.wanted().SerializeToString()),
        rpcs.said("shard", rpcs.shards_greeting(), *shards_records()),
        rpcs.said("records", *shards_records()),
    ],
}


def of(name):
    """The sound bytes of a target."""
    return [s if isinstance(s, bytes) else s.SerializeToString() for s in SEEDS[name]]
