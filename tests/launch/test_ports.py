"""A run's port is its own while nobody listens on it."""

import errno
import socket
import struct
import sys
from concurrent import futures

import grpc
import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.ports import reserved_port, reserved_ports
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire.security import Security

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3: of which ports the system gives this socket one

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reservations hold on Linux")


def given_by_the_system(port):
    """Whether the system gives this port to a server that asks for any and may have no other."""
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
        except OSError as error:
            pytest.skip(f"this system's choice of ports cannot be narrowed: {error}")
        try:
            asking.bind(("127.0.0.1", 0))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return False
        return True


def serve(port):
    server = grpc.server(futures.ThreadPoolExecutor(1), options=wire.options(10.0))
    assert Security().listen(server, f"127.0.0.1:{port}") == port
    server.start()
    return server


def test_ports_in_a_row_are_reserved_and_another_address_is_told():
    with reserved_ports(3) as first:
        assert not any(given_by_the_system(port) for port in range(first, first + 3))
    with (
        pytest.raises(ConfigError, match=r"203\.0\.113\.1: cannot be listened on"),
        reserved_ports(2, "203.0.113.1"),
    ):
        pass


def test_a_lost_connection_of_whoever_has_the_ports_is_not_swallowed():
    with pytest.raises(ConnectionResetError), reserved_ports(2):
        raise ConnectionResetError


def test_a_syncers_port_is_given_to_nobody_else_while_it_is_dead():
    with reserved_port() as port:
        assert not given_by_the_system(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        for _ in range(3):
            server = serve(port)
            socket.create_connection(("127.0.0.1", port)).close()
            assert server.stop(None).wait(60.0)
            assert not given_by_the_system(port)
    assert given_by_the_system(port)
