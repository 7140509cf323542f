"""A port that stays a run's own while no server listens on it, as while its syncer is dead."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

from ddiloco.config import ConfigError


@contextlib.contextmanager
def reserved_ports(count: int, host: str = "127.0.0.1") -> Iterator[int]:
    """The first of several free ports in a row, as `reserved_port`.

    Raises:
      ConfigError: the host is none of this machine's addresses.
    """
    while True:
        with contextlib.ExitStack() as stack:
            try:
                first = stack.enter_context(reserved_port(host))
            except OSError as error:
                raise ConfigError(f"{host}: cannot be listened on: {error.strerror}") from None
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(reserved_port(host, port))
            except (OSError, OverflowError):  # one of them is another's, or beyond the last
                continue
            yield first
            return


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A free port of `host`, or this one, kept to the end of the block.

    Until then the system gives it to no program that asks for any port. Linux lets a server with
    SO_REUSEADDR, as gRPC's are, listen on a port that a socket with the same option is bound to without
    listening. Elsewhere the port is only known to be free when the block begins.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
