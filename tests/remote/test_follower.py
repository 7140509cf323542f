"""What a host that follows does by itself: what it adopts, and how it lives where a copy finds no memory."""

import concurrent.futures
import queue
import threading
import unittest.mock

import pytest

from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.learner.follower import Follower
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_arrays import LeadingArrays
from ddiloco.remote.learner.hosts import HostPlace
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.learner_state import LearnerStates
from ddiloco.workers.inbox import Inbox
from tests.learner_states import needs_all
from tests.remote.donors import OF_A_HOST
from tests.remote.ends import TIMEOUT, assert_same, update


class NoMemory:
    """A host's arrays, for a copy of which its devices have no room."""

    def state(self):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_a_host_without_memory_for_a_snapshot_s_copy_says_so_and_lives():
    follower = Follower.__new__(Follower)
    follower._arrays, follower._say = NoMemory(), queue.SimpleQueue()
    follower._states, follower._held, follower._fetched = {}, {}, {}
    follower._place = HostPlace(1, 2, "127.0.0.1:1")
    with concurrent.futures.ThreadPoolExecutor(1) as follower._writer:
        follower._do(pb.Order(copy_all=7))
        follower._do(pb.Order(save=pb.Order.Save(copy=7, snapshot=3)))
        alarm = follower._say.get(timeout=TIMEOUT).alarm
        done = follower._say.get(timeout=TIMEOUT).done
    assert alarm.startswith("host 1: a checkpoint is not kept: RESOURCE_EXHAUSTED")
    assert (done.copy, done.problem) == (7, "host 1: RESOURCE_EXHAUSTED: out of memory")
    follower._do(pb.Order(drop=7))
    assert not follower._states


def test_a_host_that_cannot_read_its_blocks_of_a_checkpoint_says_so_and_lives(tmp_path):
    """The other hosts may have read theirs: host 0 has all of them begin otherwise."""
    follower = Follower.__new__(Follower)
    follower._say, follower._kept = queue.SimpleQueue(), LearnerStates(tmp_path, needs_all, 1)
    follower._donor, follower._inner = (unittest.mock.Mock() for _ in range(2))
    follower._place, follower._donation_timeout = HostPlace(1, 2, "127.0.0.1:1"), lambda: TIMEOUT
    follower._do(pb.Order(go_on=3))
    done = follower._say.get(timeout=TIMEOUT).done
    assert (done.copy, done.problem[:8]) == (3, "host 1: ") and "state.1.3" in done.problem


class Adopting:
    """A host's arrays that keep what they are told to adopt."""

    adopted = None

    def adopt(self, fragments, inner):
        self.adopted = fragments


@pytest.mark.parametrize("versions", [(3, 5), (3, 6)])
def test_a_welcome_that_came_to_another_host_with_another_version_is_not_adopted(versions):
    here = {(7, 0, 3, 0): "three", (8, 1, 5, 0): "five"}  # of two shards
    follower = Follower.__new__(Follower)
    follower._arrays, follower._change, follower._here = Adopting(), threading.Lock(), here
    follower._taken, follower._donor = lambda copy: None, unittest.mock.Mock()
    follower._inner, follower._donation_timeout = None, lambda: TIMEOUT
    order = pb.Order(adopt=pb.Order.Adopt(welcomes=[7, 8], versions=versions))
    if versions == (3, 5):
        follower._do(order)
        assert follower._arrays.adopted == ["three", "five"] and not here
    else:
        with pytest.raises(WireError, match="not the versions that host 0 has"):
            follower._do(order)
        assert follower._arrays.adopted is None


def test_of_the_versions_that_come_amid_a_long_step_hosts_hold_the_newest_as_host_0_does():
    follower, client = Follower.__new__(Follower), SyncerClient.__new__(SyncerClient)
    follower._here, follower._change, follower._say = {}, threading.Condition(), queue.SimpleQueue()
    follower._arrays = unittest.mock.Mock()
    client._followers, client._inbox = Followers.__new__(Followers), Inbox()
    client._followers.order = follower._do
    for version in range(1, 100):
        for told in (update(0, version), update(1, version)):
            follower._deliver(told)
            client.put(told)
    assert sorted(follower._here) == [(0, 0, 99, 0), (0, 1, 99, 0)]
    newest = client._inbox.get(0.0)
    follower._deliver(update(0, 100))
    client.put(update(0, 100))
    follower._do(pb.Order(apply=pb.Order.Apply(fragment=0, version=99)))
    applied = follower._arrays.apply.call_args.args
    assert_same(applied[2], newest.fragments[0])
    assert sorted(follower._here) == [(0, 0, 100, 0), (0, 1, 99, 0)]


@pytest.mark.parametrize("late", [False, True])
def test_a_peer_s_state_that_host_0_lets_go_of_goes_here_too_though_it_comes_late(late, monkeypatch):
    follower, comes = Follower.__new__(Follower), threading.Event()
    follower._fetched, follower._held, follower._states, follower._say = {}, {}, {}, queue.SimpleQueue()
    follower._place, follower._security, follower._token = HostPlace(1, 2, "127.0.0.1:1"), Security(), ""
    follower._config, follower._inner = RemoteConfig(), OF_A_HOST
    follower._kept = LearnerStates(None, needs_all, 1)

    def fetch(*_):
        assert comes.wait(TIMEOUT)
        return "blocks"

    monkeypatch.setattr("ddiloco.remote.learner.follower.fetch_copy", fetch)
    follower._do(pb.Order(fetch=pb.Order.Fetch(copy=7)))
    follower._do(pb.Order(fetch=pb.Order.Fetch(copy=8)))
    if late:
        follower._do(pb.Order(drop=7))
    comes.set()
    assert {follower._say.get(timeout=TIMEOUT).done.copy for _ in range(2)} == {7, 8}
    if not late:
        follower._do(pb.Order(drop=7))
    assert follower._fetched == {8: "blocks"}


def test_a_leading_host_without_memory_for_a_copy_has_the_others_drop_theirs():
    arrays, told = LeadingArrays.__new__(LeadingArrays), []
    arrays._order = told.append
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        arrays._copied("copy_all", NoMemory().state)
    assert [order.WhichOneof("kind") for order in told] == ["copy_all", "drop"]
    assert told[0].copy_all == told[1].drop
