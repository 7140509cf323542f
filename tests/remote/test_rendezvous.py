"""A learner's hosts meet at the syncer, over real connections."""

import contextlib
import dataclasses
import threading

import grpc
import pytest

from ddiloco.config import ConfigError
from ddiloco.remote.learner.rendezvous import HostPresence
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from tests.remote.ends import TERMS, TIMEOUT, SyncerEnd, ended, until

SHORT = RemoteConfig(min_hosts=1, host_timeout=0.2, longest_backoff=0.25)
LONG = dataclasses.replace(SHORT, host_timeout=TIMEOUT)  # within which nobody goes on alone
HOSTS = dataclasses.replace(TERMS, hosts=(2, 2))


class Meeting:
    """A syncer, and the hosts that are connected to it."""

    def __init__(self, stack, security=None):
        self._stack, self.security = stack, security or Security()
        self.syncer = SyncerEnd(HOSTS, self.security)
        stack.enter_context(ended(self.syncer))

    def host(self, host, config=LONG, learner=0, hosts=2, security=None):
        """A host that coordinates at port 1000 and its number; `left` is set once it is to leave."""
        left = threading.Event()
        credentials = security or self.security
        told = self.syncer.address, credentials, config, 1000 + host, left.set
        presence = HostPresence(learner, host, hosts, *told)
        presence.left = left
        self._stack.callback(presence.close)
        return presence


@pytest.fixture
def meeting():
    with contextlib.ExitStack() as stack:
        yield Meeting(stack)


def group(presence):
    found = presence.group(threading.Event())
    return list(found.hosts), found.coordinator


def test_hosts_that_are_all_there_get_one_group_with_the_first_as_coordinator(meeting):
    one, zero = meeting.host(1), meeting.host(0)
    assert group(one) == group(zero)
    hosts, coordinator = group(one)
    assert hosts == [0, 1] and coordinator.endswith(":1000")
    assert one.group(threading.Event()).name == zero.group(threading.Event()).name != ""
    alone = meeting.host(0, learner=1)
    stop = threading.Event()
    stop.set()
    assert alone.group(stop) is None, "another learner's hosts are none of its own"


def test_a_host_whose_others_do_not_come_goes_on_alone_and_leaves_as_one_does(meeting):
    one = meeting.host(1, SHORT)
    hosts, coordinator = group(one)
    assert hosts == [1] and coordinator.endswith(":1001")
    zero = meeting.host(0, SHORT)
    assert one.left.wait(TIMEOUT)
    one.close()
    again = meeting.host(1, SHORT)
    assert group(zero)[0] == group(again)[0] == [0, 1]


def test_a_group_outlives_its_syncer_and_leaves_by_the_next_one(meeting):
    one = meeting.host(1, SHORT)
    assert group(one)[0] == [1]
    port = meeting.syncer.port
    meeting.syncer.die()
    meeting.syncer = SyncerEnd(HOSTS, meeting.security, address=f"127.0.0.1:{port}")
    meeting._stack.enter_context(ended(meeting.syncer))
    rendezvous = meeting.syncer.server._host_rendezvous
    until(lambda: rendezvous._learners and not rendezvous._learners[0].rules.empty, "the host to be back")
    assert not one.left.is_set()
    meeting.host(0, SHORT)
    assert one.left.wait(TIMEOUT)


def test_a_host_that_waits_for_others_ends_with_the_run(meeting):
    zero = meeting.host(0, SHORT)
    assert group(zero)[0] == [0]
    waits = meeting.host(1, SHORT)
    assert zero.left.wait(TIMEOUT)  # it has been heard
    meeting.syncer.server.stop(0.0)
    assert waits.group(threading.Event()) is None


def present(**fields):
    told = {"version": wire.VERSION, "hosts": 2, "min_hosts": 1, "timeout": 5.0, "port": 7}
    return pb.HostPresent(**{**told, **fields}).SerializeToString()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (present(version=wire.VERSION + 1), "version"),
        (present(learner=2), "learner 2 is none of the 2"),
        (present(host=2), "host 2 is none of 2"),
        (present(group=[2]), "host 0 is none of 2"),
        (present(hosts=0), "a learner of 0 hosts"),
        (present(hosts=33), "a learner of 33 hosts, where the syncer has room for 32, by remote.hosts"),
        (present(min_hosts=3), "config.remote.min_hosts is 3, but must divide 2"),
        (present(timeout=float("nan")), "host_timeout: is nan"),
        (present(port=0), "its address is none"),
        (present(address="nowhere"), "its address is none"),
        (b"\xff", "malformed message"),
    ],
)
def test_who_is_no_host_of_a_learner_is_refused_in_a_line(meeting, message, line):
    with grpc.insecure_channel(meeting.syncer.address) as channel:
        call = channel.stream_stream(wire.RENDEZVOUS)(iter([message]), timeout=TIMEOUT)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert line in refused.value.details()
    zero, one = meeting.host(0), meeting.host(1)
    assert group(zero)[0] == group(one)[0] == [0, 1]


def test_hosts_that_differ_in_their_settings_are_refused(meeting):
    meeting.host(0)
    rendezvous = meeting.syncer.server._host_rendezvous
    until(lambda: 0 in rendezvous._learners, "host 0")
    with pytest.raises(ConfigError, match="hosts of learner 0 differ in --processes"):
        meeting.host(1, SHORT).group(threading.Event())


def test_no_learner_has_another_s_hosts():
    security = Security(tokens={0: "the token of learner 0", 1: "the token of learner 1"})
    with contextlib.ExitStack() as stack:
        meeting = Meeting(stack, security)
        stranger = meeting.host(1, learner=0, security=security.of(1))
        with pytest.raises(ConfigError, match="not the credentials of learner 0"):
            stranger.group(threading.Event())
        zero, one = (meeting.host(n, security=security.of(0)) for n in (0, 1))
        assert group(zero)[0] == group(one)[0] == [0, 1]
