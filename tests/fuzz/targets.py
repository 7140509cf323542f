"""What reads bytes that another wrote: each takes any bytes whatever, and raises nothing but what it says."""

import contextlib
import json
import pathlib
import struct
import tempfile
import zlib

import jax
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.tokenized import TokenizedSource
from ddiloco.data.tokenizers import ByteTokenizer
from ddiloco.models.dense import DenseConfig
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.streams import Collector
from ddiloco.remote.syncer.record_receiver import RecordIntake
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cuts_of
from ddiloco.remote.wire.event_messages import (
    learner_event,
    offer_of,
    syncer_event,
    update_of,
)
from ddiloco.remote.wire.payload import receive
from ddiloco.remote.wire.record_messages import learner_record, record_message
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.storage import array_file, checksummed_json
from ddiloco.storage.run_mark import RunMarkError, begun
from ddiloco.storage.score_files import Scores
from ddiloco.storage.snapshots import SnapshotError, SnapshotStore
from ddiloco.storage.tape.file import TapeError, TapeFile
from ddiloco.storage.tape.recorder import learner_tape
from ddiloco.weights.architectures import counterpart_of
from ddiloco.weights.files import INDEX, Files
from experiments.cli.credentials import load_security
from experiments.studies.replay.reading import read_tape
from tests import workbench
from tests.fuzz import rpcs
from tests.protocol.desk import Desk
from tests.remote.donors import read_donation

FORMATS = (ArrayFormat((3,), np.dtype(np.float32)), ArrayFormat((5,), np.dtype(np.uint8)))
BYTES = 17
INNER = InnerFormat([jax.ShapeDtypeStruct((3,), np.float32), jax.ShapeDtypeStruct((), np.int32)])
MAGIC = b"a file of arrays\n"
EXPERIMENT = workbench.experiment("none", driver="remote")
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="fuzzed-"))


def cut(data):
    """The data as a message and the messages after it: a byte says how long the first is."""
    at = 1 + (data[0] if data else 0)
    return iter([data[1:at], data[at : at + BYTES], data[at + BYTES :]])


def of_learner_3(record):
    assert getattr(record, "learner", 3) == 3


def from_learner(data):
    message = parse(pb.FromLearner, data)
    if message.WhichOneof("kind") == "records":
        intake = RecordIntake(of_learner_3)
        intake.joined(3, 1)
        intake.take(3, 1, message.records)
    else:
        assert learner_event(message, 3, 3)


def core(data):
    """What three learners say and offer, in turn, to the core of a syncer whose merges end at once."""
    desk = Desk(num_learners=3, num_fragments=2, interval=4, quorum=1)
    for i, payload in enumerate(rpcs.split(data)[:64]):
        learner = i % 3
        with contextlib.suppress(WireError):
            if i % 4 == 3:
                told = offer_of(parse(pb.UpHeader, payload), learner, 2)
            else:
                told = learner_event(parse(pb.FromLearner, payload), learner, 2)
            desk.handle(told, desk.now + 0.1)
        while desk.merging:
            made = desk.merging[0]
            desk.merged(made.step, made.fragment)
    return desk.core.live


def to_learner(data):
    assert syncer_event(parse(pb.ToLearner, data))


def record(data):
    record_message(learner_record(parse(pb.Record, data), 3))


def offer(data):
    messages = cut(data)
    announced = offer_of(header := parse(pb.UpHeader, next(messages)), 3, 2)
    assert announced.contribution.fragment == announced.round.fragment < 2
    arrays = receive(FORMATS, header.size, messages)
    assert sum(array.nbytes for array in arrays) == BYTES


def update(data):
    messages = cut(data)
    announced = update_of(header := parse(pb.DownHeader, next(messages)), 2)
    delivered = []
    Collector(range(2), delivered.append).take(header, announced, receive(FORMATS, header.size, messages))
    assert [told.event for told in delivered] in ([], [announced])


def blocks(data):
    cuts_of([parse(pb.Cut, data)], FORMATS[:1])


def donation(data):
    state = read_donation(cut(data), (1, 2), INNER)
    assert len(state.versions) == 2 and np.isfinite(state.arrays[0]).all()


def donation_request(data):
    tuple(parse(pb.DonationRequest, data).versions)


def peers(data):
    assert all(isinstance(address, str) for address in parse(pb.Peers, data).addresses)


def checked(data):
    """The file of arrays with these bytes after its first lines, and a checksum that fits."""
    body = MAGIC + b"crc32\n" + data
    return body + zlib.crc32(body).to_bytes(4, "little")


def array_files(data):
    header, arrays = array_file.parse(checked(data), MAGIC)
    assert isinstance(header, dict)
    assert sum(array.nbytes for array in arrays) <= len(data), "no more memory than the file has bytes"


def torn_files(data):
    array_file.parse(data, MAGIC)


def durable_values(data):
    """Incarnations, and whatever else is kept with a checksum."""
    path = FOLDER / "values.json"
    path.write_bytes(data)
    assert all(isinstance(name, str) for name in checksummed_json.load(path))


def run_mark(data):
    (FOLDER / "run.json").write_bytes(data)
    begun(FOLDER)


def snapshot(data):
    """The header of a snapshot, with its checksum where it is JSON."""
    folder = FOLDER / "snapshots" / "000003"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "snapshot.json").write_bytes(data)
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        checksummed_json.save(folder / "snapshot.json", dict(json.loads(data)))
    SnapshotStore(folder.parent, 3).open(3).check()


def scores(data):
    """What evaluator and syncer leave each other, as far as the other can read it."""
    folder = FOLDER / "evaluator"
    folder.mkdir(exist_ok=True)
    for name in ("scores.jsonl", "wanted.json"):
        (folder / name).write_bytes(data)
    between = Scores(FOLDER)
    between.new()
    between.wanted()


def tokenized(data):
    """The index of a tokenized data set."""
    folder = FOLDER / "tokenized"
    folder.mkdir(exist_ok=True)
    (folder / "tokens.json").write_bytes(data)
    TokenizedSource(DataConfig(tokenized=str(folder)), ByteTokenizer(), "train")


def model_config(data):
    """Another's config.json."""
    (FOLDER / "config.json").write_bytes(data)
    counterpart_of(DenseConfig()).check(FOLDER)


def model_weights(data):
    """Another's weights: what follows the length of a file's header."""
    path = FOLDER / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(64))
    opened = Files(path)
    for name in opened.shapes:
        opened.read(name)


def weights_index(data):
    (FOLDER / INDEX).write_bytes(data)
    try:
        Files(FOLDER)
    finally:
        (FOLDER / INDEX).unlink()


def tokens(data):
    path = FOLDER / "tokens"
    path.touch(mode=0o600)
    path.write_bytes(data)
    load_security(str(path), None)


def tape(data):
    path = learner_tape(FOLDER, 3, 7)
    path.unlink(missing_ok=True)
    written = TapeFile(path)
    for record in rpcs.split(data):
        written.append(zlib.compress(record))
    written.close()
    read_tape(path)


def torn_tape(data):
    path = learner_tape(FOLDER, 3, 8)
    path.write_bytes(data)
    read_tape(path)


TARGETS = {  # by name: what reads the bytes, and what it may raise
    "from_learner": (from_learner, WireError),
    "to_learner": (to_learner, WireError),
    "core": (core, ()),
    "record": (record, WireError),
    "offer": (offer, WireError),
    "update": (update, WireError),
    "blocks": (blocks, WireError),
    "donation": (donation, WireError),
    "donation_request": (donation_request, WireError),
    "peers": (peers, WireError),
    "array_files": (array_files, ValueError),
    "torn_files": (torn_files, ValueError),
    "durable_values": (durable_values, ValueError),
    "run_mark": (run_mark, RunMarkError),
    "snapshot": (snapshot, SnapshotError),
    "scores": (scores, ()),
    "tokenized": (tokenized, DataError),
    "model_config": (model_config, ConfigError),
    "model_weights": (model_weights, ConfigError),
    "weights_index": (weights_index, ConfigError),
    "tokens": (tokens, ConfigError),
    "tape": (tape, TapeError),
    "torn_tape": (torn_tape, TapeError),
    "rpc": (rpcs.call, ()),
}


def feed(name, data):
    """Has a target read the bytes; says how that ended, and raises what it must not raise."""
    function, expected = TARGETS[name]
    try:
        return str(function(data))
    except expected as error:
        assert "\n" not in str(error) and 0 < len(str(error)) < 400
        return str(error)
