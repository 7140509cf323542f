"""A donor that gives what a peer gave, with every number below 0 that was above, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import numpy as np

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.payload import CHUNK_BYTES


class LyingDonor:
    """Gives at once, to whoever asks, what it says has trained longer than anybody's."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """`count` hears of each donation."""
        self._count = count
        self._header: pb.DonationHeader | None = None
        self._payload = b""
        self._server = wire.server(20.0, 8)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        wire.serve(self._server, wire.DONATE, {"Donate": grpc.stream_stream_rpc_method_handler(self._donate)})

    def learn(self, donation: Iterator[bytes]) -> None:
        """Takes a sound donation, to give it on."""
        header = pb.DonationHeader.FromString(next(donation))
        payload = np.frombuffer(b"".join(donation), np.uint8)
        words = payload[: len(payload) // 4 * 4].view(np.uint32) ^ np.uint32(1 << 31)
        self._header, self._payload = header, words.tobytes() + payload[words.nbytes :].tobytes()

    def _donate(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        wanted = pb.DonationRequest.FromString(next(requests, b""))
        if self._header is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        header = pb.DonationHeader()
        header.CopyFrom(self._header)
        header.versions[:] = wanted.versions
        header.trained = 1 << 50
        yield header.SerializeToString()
        for at in range(0, len(self._payload), CHUNK_BYTES):
            yield self._payload[at : at + CHUNK_BYTES]
        self._count("a false inner state: given")
