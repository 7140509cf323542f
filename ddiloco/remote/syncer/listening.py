"""The syncer's port: bound before anything is written, served once the syncer is ready."""

from __future__ import annotations

import collections
import contextlib
import resource
import socket
from collections.abc import Callable, Mapping

from ddiloco.remote.syncer.session import MAX_CALLS
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire.calls import Answer, Call, CallServer, Handler, first_message
from ddiloco.remote.wire.interfaces import ANY, own_address
from ddiloco.remote.wire.security import Security, check_reach, host_of
from ddiloco.settings.remote import HANDSHAKE, RemoteConfig

_CALLS = 1 + 3 * MAX_CALLS  # of one learner at the same time
_SPARE_DESCRIPTORS = 64
_TO_SPARE = 32  # calls that are about to be refused


class Handshakes:
    """Calls before their first message: bounded in time and number, so that others are served."""

    def __init__(self, seconds: float, most: int) -> None:
        """`most`: beyond it the oldest call of the machine with most calls is aborted."""
        self._seconds, self._most = seconds, most
        self._waiting: list[tuple[str, Call]] = []

    async def first(self, call: Call) -> bytes:
        """The first message of a call, empty if there is none; raises Refused if that takes too long."""
        own = host_of(call.context.peer()), call
        self._waiting.append(own)
        if len(self._waiting) > self._most:
            self._crowding().cancel()
        try:
            return await first_message(call, self._seconds)
        finally:
            if own in self._waiting:
                self._waiting.remove(own)

    def _crowding(self) -> Call:
        [(crowd, _)] = collections.Counter(host for host, _ in self._waiting).most_common(1)
        oldest = next(one for one in self._waiting if one[0] == crowd)
        self._waiting.remove(oldest)
        return oldest[1]


class Listening:
    """A gRPC server that binds its port before it serves."""

    def __init__(
        self,
        address: str,
        security: Security,
        config: RemoteConfig,
        num_learners: int,
        answering: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`: HOST:PORT; 0 is any free port. `answering` is called once it answers."""
        self._answering = answering
        self.port = 0
        self.fragments_at = ""  # HOST:PORT by config.interface, once the port is bound; empty: it is not set
        self._address, self._security, self._interface = address, security, config.interface
        self.handshakes = Handshakes(HANDSHAKE, num_learners + 4)
        calls = (num_learners + 4) * (1 + _CALLS) + _TO_SPARE
        options = [*wire.options(config.keepalive), *_options(config, num_learners)]
        self.server = CallServer(security, "the syncer asks for another join token", calls, options)

    def claim(self) -> None:
        """Binds the port.

        Raises:
          ConfigError: it is not available.
        """
        if not self.port:
            own = own_address(self._interface) if self._interface else ""
            self.port = self.server.listen(self._address)
            if own:
                self.fragments_at = f"{own}:{self.port}"
                if self._address.rpartition(":")[0] not in (*ANY, own):
                    check_reach(self.fragments_at, self._security)
                    self.server.listen(self.fragments_at)

    @property
    def address(self) -> str:
        """HOST:PORT, once the port is bound."""
        host = self._address.rpartition(":")[0]
        return f"{socket.gethostname() if host in ANY else host}:{self.port}"

    def begin(self, handlers: Mapping[str, Handler], answers: Mapping[str, Answer]) -> int:
        """Serves from now on; returns the port. Raises ConfigError as `claim`, if that was not called."""
        self.claim()
        self.server.serve(wire.CONTROL, handlers, answers)
        self._answering()
        return self.port

    def stop(self, grace: float | None) -> None:
        """Releases the port, and ends all calls; running ones after `grace` seconds, None: at once."""
        self.server.stop(grace)


def take_descriptors() -> None:
    """Raises this process's limit of open files and connections to the system's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _options(config: RemoteConfig, num_learners: int) -> list[tuple[str, int]]:
    """Bounds on connections, silent ones too: half of the descriptors are for the disk.

    If learners need more than that, they get almost all.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 1 << 20
    needed = num_learners * config.connections + 8
    most = max(descriptors // 2, min(needed, descriptors - _SPARE_DESCRIPTORS), 1)
    milliseconds = int(1000 * HANDSHAKE)
    return [
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.max_connection_idle_ms", milliseconds),
    ]
