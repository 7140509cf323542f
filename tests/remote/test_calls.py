"""The syncer's calls: many wait in one event loop."""

import asyncio
import dataclasses
import threading

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import Wakeup, event_loop
from experiments.bench.raw_learners import RawConnection
from tests.remote.ends import TERMS, SyncerEnd, ended, greeting, until

LEARNERS = 40


def test_streams_that_wait_take_no_threads():
    terms = dataclasses.replace(TERMS, num_learners=LEARNERS, max_learners=LEARNERS)
    syncer = SyncerEnd(terms)
    with ended(syncer):
        connections = [RawConnection(("127.0.0.1", syncer.port)) for _ in range(LEARNERS)]
        before, sessions = threading.active_count(), []

        def accepted(data):
            message = pb.ToLearner.FromString(data)
            if message.HasField("accepted"):
                sessions.append(message.accepted.session)

        def all_accepted():
            for connection in connections:
                connection.receive()
            return len(sessions) == LEARNERS

        for learner, connection in enumerate(connections):
            stream = connection.call(wire.CONTROL, (), accepted)
            connection.send(stream, greeting(terms, learner=learner))
            connection.flush()
        until(all_accepted, "sessions of all")
        for connection, session in zip(connections, sessions, strict=True):
            connection.call(wire.UPDATES, ((wire.SESSION_KEY, session),))
            connection.flush()
        waiting = lambda: sum(len(s._open_calls) for s in syncer.server._all_sessions())  # noqa: E731
        until(lambda: waiting() == LEARNERS, "streams of all")
        assert threading.active_count() < before + LEARNERS // 2
        for connection in connections:
            connection.socket.close()
        until(lambda: not syncer.server.connected, "the end of all")


def test_a_change_during_a_look_is_seen_by_the_next():
    seen = []

    async def look():
        changed = Wakeup()
        threading.Thread(target=lambda: [changed.set() for _ in range(3)]).start()
        await changed.wait()
        seen.append("first")
        changed.set()
        await asyncio.wait_for(changed.wait(), 30.0)
        seen.append("second")

    event_loop().run(look(), 60.0)
    assert seen == ["first", "second"]
