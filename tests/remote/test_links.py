"""Links between processes: what is measured of them, their limits, and alarms of transfers far below."""

import dataclasses
import re
import socket
import threading

import grpc
import pytest

from ddiloco.config import ConfigError
from ddiloco.protocol import events
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.syncer.management import Management
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.calls import CallServer
from ddiloco.remote.wire.interfaces import own_address
from ddiloco.remote.wire.management import Answer, Command
from ddiloco.remote.wire.measuring import MAX_PROBE_BYTES, Probes, measure
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.storage import operator_orders
from ddiloco.telemetry import throughput
from ddiloco.telemetry.throughput import TransferRates
from tests.bad_network import BadNetwork, LinkShape
from tests.remote.ends import (
    CONFIG,
    TERMS,
    TIMEOUT,
    LearnerEnd,
    SyncerEnd,
    ask,
    ended,
    joined,
    until,
    update,
    welcome,
)

MIB = 1 << 20


def sent_at(bucket, sizes, now=0.0):
    """When each chunk of these sizes leaves a bucket whose sender always has more, in seconds."""
    times = []
    for size in sizes:
        while delay := bucket.take(size, now):
            now += delay
        times.append(now)
    return times


def test_a_sender_keeps_to_its_rate_and_saves_up_no_more_than_one_chunk():
    bucket = TokenBucket(100.0)
    assert sent_at(bucket, [50, 100, 20, 0, 30]) == pytest.approx([0.0, 0.5, 1.5, 1.7, 1.7])
    assert sent_at(bucket, [50, 50], now=60.0) == pytest.approx([60.0, 60.5])


def test_a_rate_holds_for_all_senders_together_and_without_one_nothing_waits():
    bucket = TokenBucket(10.0)
    assert bucket.take(5, 1.0) == 0.0
    assert bucket.take(5, 1.0) == bucket.take(1, 1.0) == pytest.approx(0.5)
    bucket.set_rate(None)
    assert bucket.take(1 << 40, 1.0) == bucket.take(1, 1.0) == 0.0


@pytest.mark.parametrize("end", [lambda bucket: bucket.set_rate(None), TokenBucket.close])
def test_who_waits_goes_on_at_once_where_the_limit_ends(end):
    bucket, taken = TokenBucket(1e-3), []

    def send():
        for chunk in bucket.limited([b"12", b"3", b"4"]):
            taken.append(chunk)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    until(lambda: taken == [b"12"], "the first chunk")
    end(bucket)
    sender.join(TIMEOUT)
    assert taken == [b"12", b"3", b"4"]


def test_links_are_limited_at_both_ends_as_ordered_also_of_who_connects_later(tmp_path):
    management = Management(Security(), TERMS.num_learners, folder=tmp_path)
    syncer, rate = SyncerEnd(management=management), 8 * MIB / 8
    with ended(syncer, LearnerEnd(syncer.address)) as (_, learner):
        link = joined(syncer, learner)
        answer = management.do(Command("limit", 0, {"bytes_per_second": rate}), "here")
        assert answer == Answer(True, "the link of learner 0 is limited to 8.38861 Mbit/s each way")
        assert link.down.limit.rate == rate
        until(lambda: learner.client._own.limit.rate == rate, "the limit")
        with ended(LearnerEnd(syncer.address, 1)) as (other,):
            joined(syncer, other, number=1)
            assert management.do(Command("limit", None, {"bytes_per_second": 2 * rate}), "here").done
            until(lambda: other.client._own.limit.rate == 2 * rate, "the limit of all")
        with ended(LearnerEnd(syncer.address, 1, process=200)) as (again,):
            until(lambda: again.client._own.limit.rate == 2 * rate, "the limit of who comes back")
        assert operator_orders.load(tmp_path).limits == {0: 2 * rate, 1: 2 * rate}
        assert management.do(Command("limit", 0, {"bytes_per_second": None}), "here").done
        until(lambda: learner.client._own.limit.rate is None, "the end of the limit")
        assert Management(Security(), TERMS.num_learners, folder=tmp_path)._orders.limits == {1: 2 * rate}
        for wrong in (0, -1.0, float("nan"), float("inf")):
            assert not management.do(Command("limit", 0, {"bytes_per_second": wrong}), "here").done


def test_updates_and_offers_keep_to_the_limit_in_what_they_wait_for():
    syncer = SyncerEnd()
    with ended(syncer, LearnerEnd(syncer.address)) as (_, learner):
        link = joined(syncer, learner)
        link.deliver(welcome(100))
        learner.next(events.Welcomed)
        waits, take = [], TokenBucket.take

        def recorded(bucket):
            bucket.take = lambda size, now: waits.append((bucket, size)) or take(bucket, size, now)

        for bucket in (link.down.limit, learner.client._own.limit):
            bucket.set_rate(1e12)
            recorded(bucket)
        link.deliver(update(1, 1))
        learner.next(events.UpdateArrived)
        ask(learner, link, 1).offer(1, 5.0)
        syncer.taken()
        sent = {bucket: sum(size for b, size in waits if b is bucket) for bucket, _ in waits}
        assert sent == {link.down.limit: 2_800_000, learner.client._own.limit: 2_800_000}
        assert max(size for _, size in waits) == MIB


@pytest.fixture
def answering():
    """The address of a process that answers probes."""
    server = CallServer(Security(), "no", 8, wire.options(TIMEOUT))
    port = server.listen("127.0.0.1:0")
    server.serve(wire.MEASURE, {"Measure": Probes().answer})
    yield "127.0.0.1", port
    server.stop(None)


@pytest.mark.parametrize("connections", [1, 2])
def test_a_thin_link_far_away_is_measured_as_what_it_is(answering, connections):
    shape = LinkShape(latency=0.02, bytes_per_second=8 * MIB)
    with BadNetwork(answering, shape) as network:
        address = "{}:{}".format(*network.address)
        link = measure(address, Security(), 8 * MIB, connections, TIMEOUT)
    assert link.round_trip >= 0.04  # a busy machine makes any of these worse, and none better
    assert MIB / 2 < link.up <= 8 * MIB * connections
    assert MIB / 2 < link.down <= 8 * MIB * connections


def test_a_syncer_answers_probes_and_none_that_are_wrong():
    syncer = SyncerEnd()
    with ended(syncer):
        assert measure(syncer.address, Security(), 4 * MIB, 1, TIMEOUT).up > 0
        probes = [
            [b"\xff"],
            [pb.Probe(up=MAX_PROBE_BYTES + 1).SerializeToString()],
            [pb.Probe(up=10).SerializeToString(), b"1234"],
            [pb.Probe(up=10).SerializeToString(), b"12345678901"],
        ]
        for probe in probes:
            with grpc.insecure_channel(syncer.address) as channel, pytest.raises(grpc.RpcError) as error:
                list(channel.stream_stream(wire.MEASURE)(iter(probe), timeout=TIMEOUT))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_transfer_at_a_tenth_of_what_was_measured_is_an_alarm_once_until_it_is_well_again():
    rates = TransferRates()
    assert [rates.add(100 * MIB, s) for s in (1.0, 90.0)] == [None, None]  # too few to know
    assert [rates.add(100 * MIB, 1.0) for _ in range(3)] == [None] * 3
    assert rates.add(10 * MIB, 1.5) is None  # too short to matter
    assert rates.add(50 * MIB, 6.0) == "52.4 MB took 6.0 s, at 8.74 MB/s; before it was 105 MB/s"
    assert rates.add(50 * MIB, 60.0) is None
    assert rates.add(0, 5.0) is None and rates.add(100 * MIB, 1.0) is None
    assert rates.add(100 * MIB, 9.0) is None and rates.add(100 * MIB, 20.0) is not None


def test_the_alarm_names_learner_and_transfer(monkeypatch):
    syncer = SyncerEnd()
    with ended(syncer, LearnerEnd(syncer.address)) as (_, learner):
        link = joined(syncer, learner)
        link.deliver(welcome(100))
        learner.next(events.Welcomed)
        for version in range(1, 5):
            link.deliver(update(1, version))
            learner.next(events.UpdateArrived)
            ask(learner, link, 1, 4 * version).offer(1, 5.0, step=4 * version)
            syncer.taken()
        monkeypatch.setattr(throughput, "SLOW", 0.0)  # now any transfer is slow
        monkeypatch.setattr(throughput, "_NOTICED_SECONDS", 0.0)
        link.deliver(update(1, 5))
        learner.next(events.UpdateArrived)
        ask(learner, link, 1, 20).offer(1, 5.0, step=20)
        syncer.taken()
        until(lambda: len(syncer.alarms()) == 2, "both alarms")
        for kind in ("an update", "an offer"):
            (told,) = [alarm for alarm in syncer.alarms() if kind in alarm]
            assert told.startswith(f"learner 0: {kind} of 2.8 MB took ")
            assert told.endswith(" MB/s (config.remote.interface)")


def test_an_interface_is_known_by_its_network_its_address_or_its_name():
    assert own_address("127.0.0.0/8") == own_address("127.0.0.1") == own_address("lo") == "127.0.0.1"
    assert own_address("127.0.0.9") == "127.0.0.9"  # all of the loopback is of this machine
    told = "config.remote.interface: 198.51.100.0/24: no address of this machine is in that network"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        own_address("198.51.100.0/24")  # of documentation
    with pytest.raises(
        ConfigError, match=r"^config.remote.interface: nic9: is no network, and no interf.*lo"
    ):
        own_address("nic9")


def test_fragments_take_the_interface_that_both_ends_are_configured_with():
    config = dataclasses.replace(CONFIG, interface="127.0.0.9")
    syncer = SyncerEnd(config=config)  # listens at 127.0.0.1
    with ended(syncer, LearnerEnd(syncer.address, config=config)) as (_, learner):
        link = joined(syncer, learner)
        link.deliver(welcome(100))
        learner.next(events.Welcomed)
        ask(learner, link, 0).offer(0, 5.0)
        syncer.taken()
        assert ("127.0.0.9", syncer.port) in connections()
        with ended(LearnerEnd(syncer.address, 1)) as (elsewhere,):  # of a machine without that network
            joined(syncer, elsewhere, number=1).deliver(welcome(100))
            elsewhere.next(events.Welcomed)
    with ended(syncer := SyncerEnd(), LearnerEnd(syncer.address, config=config)) as (_, learner):
        joined(syncer, learner).deliver(welcome(100))
        learner.next(events.Welcomed)
        assert ("127.0.0.9", syncer.port) not in connections()


def connections():
    """The ends of this machine's TCP connections over IPv4, which gRPC has on sockets of IPv6."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            ends = [end.split(":") for line in list(file)[1:] for end in line.split()[1:3]]
        found |= {(socket.inet_ntoa(bytes.fromhex(ip[-8:])[::-1]), int(port, 16)) for ip, port in ends}
    return found


def test_a_donor_is_where_its_interface_is_and_else_where_the_syncer_sees_it():
    security = Security("a token of all learners")
    seen = {}
    for interface in ("", "127.0.0.9"):
        config = dataclasses.replace(CONFIG, interface=interface)
        donor = Donor(security, TIMEOUT)
        gives_at = donor.open(config, "127.0.0.1:1")
        with ended(syncer := SyncerEnd(), end := LearnerEnd(syncer.address, gives_at=gives_at)):
            joined(syncer, end)
            seen[interface] = syncer.server._peers_of(1).addresses == [
                f"{interface or '127.0.0.1'}:{gives_at[1]}"
            ]
        donor.stop()
    assert seen == {"": True, "127.0.0.9": True}
    nowhere = dataclasses.replace(CONFIG, donor_port=None)
    assert Donor(security, TIMEOUT).open(nowhere, "10.0.0.9:1") == ("", 0)
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        Donor(Security(), TIMEOUT).open(CONFIG, "10.0.0.9:1")
