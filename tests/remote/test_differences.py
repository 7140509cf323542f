"""Differences between versions on their way to a learner: which are sent, and how versions come of them."""

import threading

import numpy as np

from ddiloco.protocol import events
from ddiloco.remote.learner.streams import HeldVersions
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.workers.exchange import EventDelivery
from tests.remote.ends import streamed, welcome

SIZE = 64  # elements of a version, float32; a difference has one byte each


def version(number):
    """The pieces of a version: all elements are its number."""
    return (np.full(SIZE, number, np.float32),)


def step(number):
    """What leads to a version from the one before."""
    return (np.full(SIZE, number, np.int8),)


def update(number, follows=True):
    event = events.UpdateArrived(0, number, number)
    return EventDelivery(event, [version(number)], difference=step(number) if follows else ())


def next_message(messages):
    """The header, and the payload's bytes."""
    header = pb.DownHeader.FromString(next(messages))
    payload = b""
    while len(payload) < header.size:
        payload += next(messages)
    return header, payload


def test_who_has_a_version_gets_what_leads_on_from_it_and_anybody_else_the_whole():
    newest, sizes = NewestFragments(), []
    here, late = Downlink(newest, sizes.append), Downlink(newest)
    messages = streamed(here)
    here.put(welcome(100, version=0))
    for _ in range(2):
        header, _ = next_message(messages)
        assert (header.welcome, header.differences) == (100, 0)
    sizes.clear()
    for number in (1, 2):
        here.put(update(number))
    header, payload = next_message(messages)
    assert (header.update.version, header.differences) == (2, 2)
    assert payload == step(1)[0].tobytes() + step(2)[0].tobytes()
    late.put(update(2))  # over this connection nothing has come yet
    header, payload = next_message(streamed(late))
    assert (header.differences, payload) == (0, version(2)[0].tobytes())
    for number in (3, 4, 5):  # three differences would still be less than the whole, but not than half of it
        here.put(update(number))
    header, _ = next_message(messages)
    assert (header.update.version, header.differences) == (5, 0)
    here.put(update(6, follows=False))
    assert next_message(messages)[0].differences == 0
    here.put(update(8))  # a version in between was never seen here
    assert next_message(messages)[0].differences == 0
    assert sizes == [2 * SIZE, 4 * SIZE, 4 * SIZE, 4 * SIZE]


def added(fragment, difference, pieces):
    assert difference[0][0] == pieces[0][0] + 1, "each is added to the version that it leads on from"
    return version(difference[0][0])


def test_versions_come_of_differences_in_whatever_order_streams_bring_them():
    held, found = HeldVersions(added), {}
    held.hold(0, 1, version(1))
    second = threading.Thread(target=lambda: found.update(second=held.after(0, 4, [step(3), step(4)])))
    second.start()
    assert held.after(0, 2, [step(2)])[0][0] == 2
    second.join(10)
    assert found["second"][0][0] == 4
    assert held.after(0, 4, [step(4)]) is None, "it has come already"
    held.hold(0, 6, version(6))  # whole, with a welcome
    held.hold(0, 5, version(5))  # an older one that was on its way
    assert held.after(0, 5, [step(5)]) is None
    assert held.after(0, 8, [step(number) for number in (5, 6, 7, 8)])[0][0] == 8


def test_nobody_waits_for_a_version_once_the_connection_has_ended():
    held, found = HeldVersions(added), []
    waiting = threading.Thread(target=lambda: found.append(held.after(0, 2, [step(2)])))
    waiting.start()
    held.close()
    waiting.join(10)
    assert found == [None]
