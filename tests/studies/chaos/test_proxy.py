"""The proxy: real bytes come through a bad line unchanged, wait in a partition, and end as they should."""

import random
import socket
import threading

import pytest

from ddiloco.launch.ports import reserved_port
from experiments.studies.chaos.proxy import Proxy
from tests.bad_network import BadNetwork, LinkShape
from tests.remote.ends import until

TIMEOUT = 30.0


class Echo:
    """A server that sends back what it gets, until the end of file."""

    def __init__(self):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                end, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(end,), daemon=True).start()

    def _echo(self, end):
        with end:
            while data := end.recv(1 << 16):
                end.sendall(data)

    def close(self):
        self.listening.close()


@pytest.fixture
def echo():
    made = Echo()
    yield made
    made.close()


def connect(proxy):
    end = socket.create_connection(proxy.address, TIMEOUT)
    end.settimeout(TIMEOUT)
    return end


def receive(end, size):
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        assert more, f"the connection ended after {len(data)} of {size} bytes"
        data += more
    return data


def test_bytes_come_through_a_bad_line_unchanged(echo):
    data = random.Random(0).randbytes(500_000)
    shape = LinkShape(latency=0.001, jitter=0.002, loss=0.01, retransmission=0.002, bytes_per_second=1e8)
    with BadNetwork(echo.address, shape) as proxy, connect(proxy) as end:
        threading.Thread(target=end.sendall, args=(data,), daemon=True).start()
        assert receive(end, len(data)) == data


def test_a_partition_passes_nothing_closes_nothing_and_heals(echo):
    with Proxy(echo.address) as proxy, connect(proxy) as end:
        end.sendall(b"before")
        assert receive(end, 6) == b"before"
        until(lambda: proxy.passed == 12, "all passed on")
        proxy.partition()
        end.sendall(b"after")
        until(lambda: proxy.taken == 17, "the proxy to have read it")
        with connect(proxy) as another:
            another.sendall(b"new")
            until(lambda: proxy.connections == 2, "another connection")
            assert proxy.passed == 12
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)
            end.settimeout(TIMEOUT)
            proxy.heal()
            assert receive(end, 5) == b"after"
            assert receive(another, 3) == b"new"


def test_a_partitioned_link_holds_a_bounded_number_of_bytes():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shape = LinkShape(buffer_bytes=1 << 17)
        with BadNetwork(silent.getsockname(), shape) as proxy, connect(proxy) as end:
            until(lambda: proxy.connections == 1, "a connection")
            far, _ = silent.accept()
            proxy.partition()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            end.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while sent < 1 << 26:
                    sent += end.send(bytes(1 << 16))
            assert proxy.taken <= (1 << 17) + 2 * (1 << 16)  # and one chunk in each hand
            far.close()


def test_the_end_of_one_direction_is_passed_on_and_the_other_goes_on(echo):
    with Proxy(echo.address) as proxy, connect(proxy) as end:
        end.sendall(b"last words")
        end.shutdown(socket.SHUT_WR)
        assert receive(end, 10) == b"last words"
        assert end.recv(1) == b""


def test_without_a_server_a_connection_is_closed_and_the_next_one_may_work(echo):
    with reserved_port() as port, Proxy(nobody := ("127.0.0.1", port)) as proxy, connect(proxy) as end:
        with pytest.raises(ConnectionError):
            if not end.recv(1):
                raise ConnectionError("closed")
        with socket.create_server(nobody) as server, connect(proxy) as again:
            again.sendall(b"x")
            far, _ = server.accept()
            assert receive(far, 1) == b"x"
            far.close()


def test_a_server_that_dies_takes_its_connections_along():
    server = socket.create_server(("127.0.0.1", 0))
    with server, Proxy(server.getsockname()) as proxy, connect(proxy) as end:
        end.sendall(b"x")
        far, _ = server.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as by a kill
        far.close()
        with pytest.raises(ConnectionError):
            if not end.recv(1):
                raise ConnectionError("closed")


def test_a_proxy_that_closes_ends_its_connections_and_closes_once(echo):
    proxy = Proxy(echo.address).start()
    with connect(proxy) as end:
        end.sendall(b"x")
        assert receive(end, 1) == b"x"
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionError):
            if not end.recv(1):
                raise ConnectionError("closed")
