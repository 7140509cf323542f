"""Reads TensorBoard's event files back, record by record with their checksums."""

import collections
import struct

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


def read(folder):
    """The events of the one file in a run's folder."""
    [path] = folder.glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:
        length, length_crc = data[:8], data[8:12]
        (size,) = struct.unpack("<Q", length)
        body, body_crc = data[12 : 12 + size], data[12 + size : 16 + size]
        assert struct.unpack("<I", length_crc)[0] == masked_crc32c(length)
        assert struct.unpack("<I", body_crc)[0] == masked_crc32c(body)
        events.append(Event.FromString(body))
        data = data[16 + size :]
    assert events[0].file_version == "brain.Event:2"
    return events[1:]


def scalars(folder):
    """By tag: (step, value) in the order of writing."""
    found = collections.defaultdict(list)
    for event in read(folder):
        for value in event.summary.value:
            found[value.tag].append((event.step, value.simple_value))
    return found
