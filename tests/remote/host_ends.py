"""Both ends of the connection between the hosts of a learner, with what a test has them say."""

import concurrent.futures
import queue
import threading
import unittest.mock

import grpc

from ddiloco.remote.learner.follower import Follower
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.hosts import HostPlace
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.learner_state import LearnerStates
from tests.learner_states import needs_all
from tests.remote.donors import OF_A_HOST
from tests.remote.ends import TERMS, TIMEOUT

SECURITY = Security("the learner's token")


class Host:
    """A follower that says and hears what a test has it."""

    def __init__(self, address, security=SECURITY, **following):
        self.heard = queue.SimpleQueue()
        self.error = None
        self._say = queue.SimpleQueue()
        first = {"host": 1, "learner": 0, "fingerprint": TERMS.fingerprint, "rules": TERMS.rules, **following}
        self.say(following=pb.FromHost.Following(**first))
        self._channel = security.peer_channel(address, wire.options(20.0))
        self._orders = self._channel.stream_stream(wire.FOLLOW)(
            iter(self._say.get, None), metadata=security.metadata, wait_for_ready=True, timeout=TIMEOUT
        )
        threading.Thread(target=self._hear, daemon=True).start()

    def say(self, **message):
        self._say.put(pb.FromHost(**message).SerializeToString())

    def here(self, told_of):
        self.say(here=pb.Here(**told_of))

    def next(self):
        return self.heard.get(timeout=TIMEOUT)

    def leave(self):
        self._orders.cancel()
        self._channel.close()

    def _hear(self):
        try:
            for data in self._orders:
                self.heard.put(pb.Order.FromString(data))
        except grpc.RpcError as error:
            self.error = error.code()


class Leading:
    def __init__(self, count, security=SECURITY):
        self.lost, self.left, self.delivered = [], threading.Event(), []
        self.followers = Followers(count, 0, TERMS, security, TIMEOUT, self.lost.append, self.left.set)
        self.followers.deliver = self.delivered.append

    def hosts(self, one=None, two=None, **both):
        """Two hosts that follow; what only one of them says goes before what both do."""
        hosts = [Host(self.address, host=n, **both, **(own or {})) for n, own in ((1, one), (2, two))]
        assert self.followers.gather(threading.Event(), print)
        return hosts

    def close(self):
        self.followers.stop()


class Alone(Follower):
    """Host 1 of 2 without a connection or a stream, with the test's arrays."""

    def __init__(self, arrays=None, folder=None):
        self.arrays = self._arrays = arrays or unittest.mock.Mock()
        self._say = queue.SimpleQueue()
        self._states, self._held, self._fetched, self._here, self._token = {}, {}, {}, {}, ""
        self._place, self._security, self._config = HostPlace(1, 2, "127.0.0.1:1"), Security(), RemoteConfig()
        self._inner, self._kept = OF_A_HOST, LearnerStates(folder, needs_all, 1)
        self._donor, self._change = unittest.mock.Mock(), threading.Condition()
        self._batches = unittest.mock.Mock()
        self._writer = concurrent.futures.ThreadPoolExecutor(1)

    def do(self, **order):
        self.order(pb.Order(**order))

    def order(self, order):
        self._do(order)

    def deliver(self, delivery):
        self._deliver(delivery)

    def _donation_timeout(self):
        return TIMEOUT

    def next_message(self):
        """Its next message to host 0."""
        return self._say.get(timeout=TIMEOUT)

    def copies(self):
        return {**self._states, **self._fetched}

    def fragments(self):
        return sorted(self._here)
