"""Inner optimizer states from learner to learner, over a real wire: of which boundary, to whom, what not."""

import concurrent.futures
import contextlib

import grpc
import jax
import numpy as np
import pytest

from ddiloco.arrays.blocks import Blocks, Cut, box_of
from ddiloco.config import ConfigError
from ddiloco.remote.learner.donation import Donation, Recipient, _Call, _checked, fetch_copy
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.likeness import check_alike
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.security import Security, donor_address
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage.learner_state import OfAllHosts
from ddiloco.workers.exchange import InnerState
from tests.remote.donors import FORMAT, LEAVES, Steps, ask, assert_same, state
from tests.remote.ends import TIMEOUT, until


def test_an_inner_state_arrives_bit_for_bit_with_the_boundary_it_is_of():
    with Steps(given := state(2)) as donor:
        assert_same(ask(donor.address), given)
        assert donor.wishes[0].versions == (3, 4)
        for _ in range(20):
            assert_same(ask(donor.address), given)  # and again: the one before has let go of the donor


def test_a_learner_that_does_not_step_yet_refuses_at_once():
    donor = Donor(Security(), 20.0)
    address = f"127.0.0.1:{donor.start('127.0.0.1')}"
    with pytest.raises(grpc.RpcError) as raised:
        ask(address)
    assert raised.value.details() == "the learner does not step yet"
    donor.stop()


def test_a_learner_without_memory_for_a_copy_says_so_at_once():
    with Steps(MemoryError("that much is not there")) as donor:
        with pytest.raises(grpc.RpcError) as raised:
            ask(donor.address)
        assert (raised.value.code(), raised.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "that much is not there",
        )
        donor.given = state(2)
        assert_same(ask(donor.address), donor.given)


def test_a_peer_that_asks_while_the_call_before_ends_waits_its_turn():
    with Steps(None) as donor, concurrent.futures.ThreadPoolExecutor() as others:
        first = others.submit(ask, donor.address, timeout=1.0)
        until(lambda: donor.wishes, "the first wish")
        donor.given = state(2)
        assert_same(ask(donor.address), donor.given)
        assert first.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED


def marred():
    """An inner state of which one number is not finite."""
    given = state(1)
    given.arrays[1][3, 5] = np.nan
    return given


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (marred(), "donation not finite"),
        (state(1, versions=(3, 3)), "donation of another time"),
        (state(1, versions=(3,)), "donation of another time"),
        (InnerState(7, (3, 4), [*state(1).arrays[:2], np.zeros((1, 3), np.float32)]), "blocks of another"),
    ],
)
def test_what_does_not_fit_is_refused(given, why):
    with Steps(given) as donor, np.errstate(invalid="ignore"), pytest.raises(WireError, match=why):
        ask(donor.address)


COPY = 77
ROWS, ALL = (((0, 300), (0, 700)), ((300, 500), (0, 700))), [Cut.whole(leaf.shape) for leaf in LEAVES]


def of_host(whole, number):
    """What one of two hosts answers for: half of the rows of the second leaf, host 0 all of the others."""
    rows = Cut(LEAVES[1].shape, (ROWS[number],))
    cuts = [ALL[0], rows, ALL[2]] if number == 0 else [Cut(ALL[0].shape, ()), rows, Cut(ALL[2].shape, ())]
    return [
        Blocks(x.shape, dict(zip(c.boxes, c.of(x), strict=True))) for x, c in zip(whole, cuts, strict=True)
    ]


@contextlib.contextmanager
def two_hosts(copy=COPY, addresses=lambda other: [other]):
    """A donor of two hosts, where what it gives is, and the address of its second host."""
    whole = [np.asarray(jax.random.normal(jax.random.key(0), x.shape), x.dtype) for x in LEAVES]
    second = Donor(Security(), 20.0, {copy: of_host(whole, 1)})
    port = f"127.0.0.1:{second.start('127.0.0.1')}"
    second.attach(None, FORMAT)
    given = InnerState(7, (3, 4), OfAllHosts(of_host(whole, 0), COPY))
    with Steps(given, others=addresses(port)) as first:
        yield first, whole, port
    second.stop()


def test_a_learner_of_two_hosts_gives_a_peer_what_each_of_them_has():
    with two_hosts() as (donor, whole, _):
        assert_same(ask(donor.address), InnerState(7, (3, 4), whole))


def test_each_host_of_a_peer_gets_its_own_blocks_while_the_donation_is_open():
    columns = [(slice(None), slice(0, 400)), (slice(None), slice(400, 700))]
    formats = [
        InnerFormat(LEAVES, [ALL[0], Cut(LEAVES[1].shape, (box_of(c, LEAVES[1].shape),)), ALL[2]])
        for c in columns
    ]
    with two_hosts() as (donor, whole, _):
        recipient = [Recipient(inner, Security(), 20.0) for inner in formats]
        donation = Donation(recipient[0], donor.address, (3, 4), TIMEOUT).open()
        taken = donation.take().arrays
        copy, hosts = donation.rest
        others = fetch_copy(recipient[1], hosts, copy, TIMEOUT)
        for blocks, own in ((taken, columns[0]), (others, columns[1])):
            assert blocks[0].all == whole[0]
            np.testing.assert_array_equal(blocks[1].all, whole[1][own])
        donation.close()

        def gone():
            try:
                fetch_copy(recipient[1], hosts[:1], copy, TIMEOUT)
            except WireError:
                return False  # it still gives, though one host alone is not a whole
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.NOT_FOUND

        until(gone, "the donor to let go of it")


def test_many_hosts_of_a_peer_are_given_to_at_once():
    leaf = jax.ShapeDtypeStruct((4000, 4000), np.float32)  # 64 MB: more than may be on its way
    inner = InnerFormat([leaf])
    donor = Donor(Security(), 20.0, {COPY: [np.zeros(leaf.shape, leaf.dtype)]})
    address = f"127.0.0.1:{donor.start('127.0.0.1')}"
    donor.attach(None, inner)
    with contextlib.ExitStack() as stack:
        stack.callback(donor.stop)
        for _ in range(40):
            recipient = Recipient(inner, Security(), 20.0)
            call = _Call(recipient, address, pb.DonationRequest(copy=COPY), TIMEOUT)
            stack.callback(call.close)
            assert _checked(call.messages, inner).size == 4 * leaf.size  # nobody reads the rest yet


@pytest.mark.parametrize(
    ("copy", "addresses", "error", "why"),
    [
        (COPY, lambda other: [], WireError, "donation with gaps"),
        (COPY, lambda other: ["unix:/tmp/x"], WireError, "hosts that are nowhere"),
        (COPY, lambda other: [other] * 4097, WireError, "hosts that are nowhere"),
        (COPY + 1, lambda other: [other], grpc.RpcError, "no such copy"),
    ],
)
def test_a_donor_of_hosts_that_do_not_make_a_whole_is_refused(copy, addresses, error, why):
    with two_hosts(copy, addresses) as (donor, *_), pytest.raises(error, match=why):
        ask(donor.address)


def test_a_host_takes_no_blocks_that_are_unlike_its_own_copy():
    whole = [np.ones(leaf.shape, leaf.dtype) for leaf in LEAVES]
    for factor, alike in ((2, True), (1000, False), (-1, False)):
        blocks = of_host([factor * np.asarray(x) for x in whole], 0)
        with contextlib.nullcontext() if alike else pytest.raises(ValueError, match="unlike"):
            check_alike(whole, blocks)


def test_another_optimizer_s_state_is_refused_before_it_travels():
    with Steps(state(1)) as donor, pytest.raises(WireError, match="another inner optimizer"):
        ask(donor.address, inner=InnerFormat(LEAVES[:2]))


def test_beyond_the_loopback_a_donor_asks_for_a_token_as_the_syncer_does():
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        Donor(Security(), 20.0).start("0.0.0.0")
    donor = Donor(Security(token="t" * 32), 20.0)
    assert donor.start("0.0.0.0")
    donor.stop()


def test_without_the_token_there_is_no_donation():
    with Steps(state(1), Security(token="t" * 32)) as donor:
        with pytest.raises(grpc.RpcError) as raised:
            ask(donor.address, security=Security(token="u" * 32))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not donor.wishes
        assert_same(ask(donor.address, security=Security(token="t" * 32)), state(1))


@pytest.mark.parametrize(
    ("peer", "port", "address"),
    [
        ("ipv4:10.0.0.7:5123", 80, "10.0.0.7:80"),
        ("ipv6:%5B::1%5D:5123", 80, "[::1]:80"),
        ("unix:/tmp/socket", 80, None),
        ("ipv4:10.0.0.7:5123", 0, None),
        ("ipv4:10.0.0.7:5123", 70000, None),
    ],
)
def test_a_donor_is_where_its_connection_comes_from(peer, port, address):
    assert donor_address(peer, port) == address
