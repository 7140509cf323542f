"""What a host that follows does by itself: what it adopts, and how it lives where a copy finds no memory."""

import threading

import pytest

from ddiloco.remote.learner.client import SyncerClient
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_arrays import LeadingArrays
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.validation import WireError
from ddiloco.workers.inbox import Inbox
from tests.remote.ends import TIMEOUT, assert_same, update
from tests.remote.host_ends import Alone


class NoMemory:
    """A host's arrays, for a copy of which its devices have no room."""

    def state(self):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_a_host_without_memory_for_a_snapshot_s_copy_says_so_and_lives():
    follower = Alone(NoMemory())
    follower.do(copy_all=7)
    follower.do(save=pb.Order.Save(copy=7, snapshot=3))
    alarm, done = follower.next_message().alarm, follower.next_message().done
    assert alarm.startswith("host 1: a checkpoint is not kept: RESOURCE_EXHAUSTED")
    assert (done.copy, done.problem) == (7, "host 1: RESOURCE_EXHAUSTED: out of memory")
    follower.do(drop=7)
    assert not follower.copies()


def test_a_host_that_cannot_read_its_blocks_of_a_checkpoint_says_so_and_lives(tmp_path):
    """The other hosts may have read theirs: host 0 has all of them begin otherwise."""
    follower = Alone(folder=tmp_path)
    follower.do(go_on=3)
    done = follower.next_message().done
    assert (done.copy, done.problem[:8]) == (3, "host 1: ") and "state.1.3" in done.problem


@pytest.mark.parametrize("versions", [(3, 5), (3, 6)])
def test_a_welcome_that_came_to_another_host_with_another_version_is_not_adopted(versions):
    follower = Alone()
    for key, pieces in (((7, 0, 3, 0), "three"), ((8, 1, 5, 0), "five")):  # of two shards
        follower._here[key] = pieces
    order = pb.Order.Adopt(welcomes=[7, 8], versions=versions)
    if versions == (3, 5):
        follower.do(adopt=order)
        follower.arrays.adopt.assert_called_once_with(["three", "five"], None)
        assert not follower.fragments()
    else:
        with pytest.raises(WireError, match="not the versions that host 0 has"):
            follower.do(adopt=order)
        follower.arrays.adopt.assert_not_called()


def test_of_the_versions_that_come_amid_a_long_step_hosts_hold_the_newest_as_host_0_does():
    follower, client = Alone(), SyncerClient.__new__(SyncerClient)
    client._followers, client._inbox = Followers.__new__(Followers), Inbox()
    client._followers.order = follower.order
    for version in range(1, 100):
        for told in (update(0, version), update(1, version)):
            follower.deliver(told)
            client.put(told)
    assert follower.fragments() == [(0, 0, 99, 0), (0, 1, 99, 0)]
    newest = client._inbox.get(0.0)
    follower.deliver(update(0, 100))
    client.put(update(0, 100))
    follower.do(apply=pb.Order.Apply(fragment=0, version=99))
    assert_same(follower.arrays.apply.call_args.args[2], newest.fragments[0])
    assert follower.fragments() == [(0, 0, 100, 0), (0, 1, 99, 0)]


@pytest.mark.parametrize("late", [False, True])
def test_a_peer_s_state_that_host_0_lets_go_of_goes_here_too_though_it_comes_late(late, monkeypatch):
    follower, comes = Alone(), threading.Event()

    def fetch(*_):
        assert comes.wait(TIMEOUT)
        return "blocks"

    monkeypatch.setattr("ddiloco.remote.learner.follower.fetch_copy", fetch)
    for copy in (7, 8):
        follower.do(fetch=pb.Order.Fetch(copy=copy))
    if late:
        follower.do(drop=7)
    comes.set()
    assert {follower.next_message().done.copy for _ in range(2)} == {7, 8}
    if not late:
        follower.do(drop=7)
    assert follower.copies() == {8: "blocks"}


def test_a_leading_host_without_memory_for_a_copy_has_the_others_drop_theirs():
    arrays, told = LeadingArrays.__new__(LeadingArrays), []
    arrays._order = told.append
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        arrays._copied("copy_all", NoMemory().state)
    assert [order.WhichOneof("kind") for order in told] == ["copy_all", "drop"]
    assert told[0].copy_all == told[1].drop
