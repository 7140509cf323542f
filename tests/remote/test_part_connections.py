"""How soon a learner tries again to reach a part of the syncer."""

import types

import grpc

from ddiloco.remote.learner import part_connections
from ddiloco.settings.remote import RemoteConfig


class Unavailable(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE


def test_a_connection_that_lasted_makes_the_next_try_come_soon(monkeypatch):
    now, tries = [0.0], []
    lasted = iter([0.1, 0.1, 0.1, 20.0, 0.1])  # seconds: the part is away, there, and away again

    def connect(self):
        now[0] += next(lasted)
        raise Unavailable

    def backoff(failures, longest):
        tries.append(failures)
        if len(tries) == 5:
            connection.close()
        return 0.0

    monkeypatch.setattr(part_connections, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(part_connections, "backoff", backoff)
    monkeypatch.setattr(part_connections._PartConnection, "_connect", connect)
    made = types.SimpleNamespace(config=RemoteConfig(longest_backoff=15.0))
    connection = part_connections._PartConnection(made, 0, 2, "nowhere:1")
    connection._run()
    assert tries == [1, 2, 3, 1, 2]
