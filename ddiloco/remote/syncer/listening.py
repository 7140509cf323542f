"""The syncer's port: taken before anything is written, answered once there is somebody to answer."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import grpc

from ddiloco.remote.wire import agreement as wire
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig

MOST_CONNECTIONS = 16  # of one learner, the bound of RemoteConfig.connections
_CALLS = 3 + 2 * MOST_CONNECTIONS  # of one learner at the same time


class Listening:
    """A gRPC server that has its port to itself before it answers."""

    def __init__(self, address: str, security: Security, config: RemoteConfig, num_learners: int) -> None:
        """`address`: HOST:PORT; 0 is any free port."""
        self.port = 0
        self._address, self._security = address, security
        calls = (num_learners + 4) * _CALLS
        self._server = wire.server(config.keepalive, calls, _options(config))

    def claim(self) -> None:
        """Takes the port.

        Raises:
          ConfigError: it is not available.
        """
        if not self.port:
            self.port = self._security.listen(self._server, self._address)

    def begin(self, handlers: Mapping[str, grpc.RpcMethodHandler]) -> int:
        """Answers from now on; returns the port. Raises ConfigError as `claim`, if that was not called."""
        self.claim()
        wire.serve(self._server, wire.CONTROL, handlers)
        return self.port

    def stop(self, grace: float | None) -> None:
        """Lets go of the port, and ends all calls; those under way after `grace` seconds, None: at once."""
        self._server.stop(grace).wait(5.0)


def _options(config: RemoteConfig) -> list[tuple[str, int]]:
    """Bounds on connections that say nothing: half of the descriptors are for the disk."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    milliseconds = int(1000 * config.handshake)
    return [
        ("grpc.max_allowed_incoming_connections", max(1, min(descriptors, 1 << 20) // 2)),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.max_connection_idle_ms", milliseconds),
    ]
