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
