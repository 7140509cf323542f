"""Limits and checks of both sides of the wire: version, sizes, gRPC's options, messages."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ddiloco.schema.events_pb2 import Event, Report

VERSION = 21  # of wire.proto with the events in it; both ends must have the same
CHUNK_BYTES = 1 << 20  # of a fragment in one message
MAX_DIFFERENCES = 32  # of a fragment that are sent together
MAX_MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)  # a longer one is refused before it is in memory
LARGEST = 1 << 53  # of any whole number on the wire; counters that a float64 cannot hold are nonsense
MAX_TEXT = 32 << 10  # characters of a traceback; of a reason 500

CONTROL = "/ddiloco.wire.Syncer/Control"
UPDATES = "/ddiloco.wire.Syncer/Updates"
OFFERS = "/ddiloco.wire.Syncer/Offers"
PEERS = "/ddiloco.wire.Syncer/Peers"
MEASURE = "/ddiloco.wire.Syncer/Measure"
FOLLOW = "/ddiloco.wire.Hosts/Follow"
RENDEZVOUS = "/ddiloco.wire.Syncer/Rendezvous"
SHARD = "/ddiloco.wire.Syncer/Shard"
DONATE = "/ddiloco.wire.Learner/Donate"
SESSION_KEY = "ddiloco-session"  # metadata that connects a call with its learner's control stream
HOST_KEY = "ddiloco-host"  # metadata that names which of the learner's hosts calls; none: its only one
MAX_HOSTS = 4096  # of a learner

M = TypeVar("M", bound=Message)


class WireError(Exception):
    """A message from the other end cannot be read.

    Attributes:
      reason: one of a few phrases, used for counting.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def parse(kind: type[M], data: bytes) -> M:
    """The protobuf message in `data`, with plausible numbers; those in records are not checked.

    Raises:
      WireError: there is none, or it has an impossible number.
    """
    try:
        message = kind.FromString(data)
    except (DecodeError, RecursionError) as error:
        raise WireError("malformed message", type(error).__name__) from None
    _check_numbers(message)
    return message


def _check_report(r: Report) -> None:
    """`_check_numbers` of the frequent kind of message, without its reflection."""
    counts = (r.incarnation, r.step, r.steps, r.tokens, *r.shards, *r.places, *r.versions)
    bases = (*r.base_steps, *r.base_tokens, 0)
    if max(*counts, *bases) > LARGEST or min(bases) < -LARGEST:
        raise WireError("number too large", "in a report")
    if min(counts) < 0:
        raise WireError("number below 0", "in a report")


def _check_numbers(message: Message) -> None:
    if isinstance(message, Event) and message.HasField("step_reported"):
        _check_report(message.step_reported.report)
        return
    for field, value in message.ListFields():
        if field.name in ("records", "metrics"):
            continue
        values = value if field.is_repeated else [value]
        if field.type == field.TYPE_MESSAGE:
            for part in values:
                _check_numbers(part)
        elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64, field.TYPE_INT64, field.TYPE_SINT64):
            most, least = max(values), min(values)
            if most > LARGEST or least < -LARGEST:
                raise WireError("number too large", f"{field.name} is {max(most, -least)}")
            if least < 0 and field.type != field.TYPE_SINT64:
                raise WireError("number below 0", f"{field.name} is {least}")


@contextlib.contextmanager
def ended_after(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` if the `with` block takes longer."""
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def server(
    keepalive: float,
    calls: int,
    more_options: Sequence[tuple[str, int]] = (),
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> grpc.Server:
    """A server of at most `calls` calls at a time, which refuses others; it does not listen yet."""
    return grpc.server(
        concurrent.futures.ThreadPoolExecutor(calls, thread_name_prefix="wire"),
        options=[*options(keepalive), *more_options],
        maximum_concurrent_rpcs=calls,
        interceptors=interceptors,
    )


def serve(server: grpc.Server, path: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
    """Adds a service with the calls under `path` to the server, and starts it."""
    handler = grpc.method_handlers_generic_handler(path.split("/")[1], handlers)
    server.add_generic_rpc_handlers((handler,))
    server.start()


def options(keepalive: float) -> list[tuple[str, int]]:
    """gRPC's options for either end; `keepalive` is in seconds."""
    milliseconds = int(1000 * keepalive)
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 8 << 10),
        # One frame for each chunk: with the default of 16 KiB half the time goes into frames.
        ("grpc.http2.max_frame_size", 2 * CHUNK_BYTES),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", max(1, milliseconds // 2)),
        ("grpc.http2.max_ping_strikes", 0),
        # Each channel has a connection of its own, and a port has one syncer.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),  # clusters set one for the web, and it does not reach their nodes
    ]


REPLACED = grpc.StatusCode.ALREADY_EXISTS  # status of a process's call once a newer process replaced it


_PREFACE = re.compile(
    r"failed to connect to all addresses; last error: \w+: (ipv[46]:\S+: )?"
    r"(Failed to connect to remote host: )?"
)


def cause(error: grpc.RpcError) -> str:
    """Why a call failed, without what gRPC says in front of the system's own reason."""
    return _PREFACE.sub("", error.details() or error.code().name)


def permanent(code: grpc.StatusCode) -> bool:
    """Whether a retry of a call that ended with this code would end with it again."""
    return code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, REPLACED)


def metadata_value(metadata: tuple | None, key: str) -> str:
    """The text under `key`; empty if there is none."""
    return dict(metadata or ()).get(key, "")
