"""Killed in the middle of an offer: the round goes on; of a donation: another learner is asked."""

import concurrent.futures
import dataclasses
import os
import signal
import sys
import threading
import types
import weakref

import grpc
import jax
import numpy as np
import pytest

from ddiloco.arrays.host_memory import aligned_empty
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.recovery import ProcessRecovery
from ddiloco.remote.syncer.listening import Listening
from ddiloco.remote.syncer.server import SyncerServer
from ddiloco.remote.wire import payload
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message
from ddiloco.remote.wire.payload import PayloadReader
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.learner_state import LearnerStates
from ddiloco.telemetry import records
from ddiloco.workers.exchange import InnerState, InnerStateWanted
from ddiloco.workers.syncer_worker import SyncerWorker
from ddiloco.workers.transfer import Offer
from tests.bad_network import BadNetwork, LinkShape
from tests.integration.programs import ROOT
from tests.remote.donors import THREE, Steps, ask, notes, with_client
from tests.remote.ends import CONFIG, TERMS, TIMEOUT, LearnerEnd, SyncerEnd, Taken, ended, joined, until
from tests.warm import Program

SHAPE = (4000, 1000)  # float32: 16 MB, more than what may be on the way
THETA = {"kernel": np.zeros(SHAPE, np.float32)}
LAYOUT = fragment({"kernel": SHAPE}, 1)
LARGE = tuple(ArrayFormat(shape, np.dtype(np.float32)) for shape in LAYOUT.piece_shapes(0))
BIG_TERMS = dataclasses.replace(TERMS, up=((LARGE,),), down=(LARGE,))
POLICY = SyncPolicy(num_learners=2, num_fragments=1, interval=4, quorum=1, max_grace=0.0)
THIN = LinkShape(bytes_per_second=8e6, buffer_bytes=1 << 16)
LARGE_STATE = InnerState(7, (3, 4), [np.ones(SHAPE, np.float32)])
LARGE_INNER = InnerFormat([jax.ShapeDtypeStruct(SHAPE, np.float32)])


def child(function, argument):
    """A process that does what the function of this file does."""
    return Program(
        "tests.remote.test_half_sent", [function.__name__, argument], environment=os.environ, cwd=ROOT
    )


class Giver(LearnerEnd):
    """A learner without steps: joins, and offers arrays full of one value at the round of each due step."""

    def __init__(self, address, learner, value, process=100):
        super().__init__(address, learner, process, terms=BIG_TERMS)
        self.number, self.value, self.process = learner, value, process
        self.send(events.LearnerJoined(learner, process))
        delivery = self.next(events.Welcomed)
        self.send(events.LearnerReady(learner, process, 0, delivery.event.versions))

    def report(self, step):
        """Reports a step of ten tokens."""
        counters = (FragmentCounters(0, step, 10 * step),)
        self.send(events.StepReported(Report(self.number, self.process, step, counters)))

    def give(self, step):
        """Steps up to the due step, and offers what it was asked for on the way."""
        for earlier in range(1, step):
            self.report(earlier)
        asked = self.next(events.OfferAsked).event
        assert (asked.round, asked.version) == (RoundId(step, 0), 0)
        self.report(step)
        given = tuple(np.full(part.shape, self.value, part.dtype) for part in LARGE)
        contribution = Contribution(self.number, self.process, 0, 0, step, step, 10 * step)
        self.client.send(asked.round, contribution, Offer(given))


def give_slowly(address):
    """The child's part: a learner whose offer takes seconds."""
    giver = Giver(address, 1, value=7.0, process=200)
    giver.give(4)
    threading.Event().wait()  # until it is killed


def donate_slowly(_):
    """The child's part: a donor, whose port it tells."""
    donor = Steps(LARGE_STATE, inner=LARGE_INNER)
    print(donor.address.rpartition(":")[2], flush=True)
    threading.Event().wait()


@pytest.fixture
def syncer():
    """A SyncerWorker and its server; `records` has what they recorded."""
    made = types.SimpleNamespace(records=Taken())
    config = OuterConfig(merge="direct", optimizer="direct", learning_rate=1.0)
    made.model = GlobalModel(LAYOUT, THETA, config, 2)
    made.model.compile()
    core = SyncerCore(POLICY, 1000)
    worker = SyncerWorker(core, made.model, made.records.append, lambda step, fragments: None)
    listening = Listening("127.0.0.1:0", Security(), CONFIG, BIG_TERMS.max_learners)
    server = SyncerServer(BIG_TERMS, Security(), listening, worker, made.records.append)
    made.address = ("127.0.0.1", server.start())
    server.open()
    worker.start()
    yield made
    server.stop(0.0)
    worker.stop(TIMEOUT)


def killed_in_the_middle(monkeypatch, process):
    """The process is killed as soon as this one has taken the second chunk of what it sends."""
    add, taken = PayloadReader.add, []

    def adding(reader, chunk):
        add(reader, chunk)
        taken.append(chunk)
        if len(taken) == 2:
            process.kill()
            process.wait()

    monkeypatch.setattr(PayloadReader, "add", adding)
    return taken


def noted(syncer, name):
    return [r.values for r in list(syncer.records) if isinstance(r, records.Noted) and r.name == name]


def test_of_a_learner_killed_in_the_middle_of_a_push_nothing_is_merged_and_nothing_is_kept(
    syncer, monkeypatch
):
    taken = []

    def remembered(shape, dtype):
        array = aligned_empty(shape, dtype)
        taken.append(weakref.ref(array))
        return array

    monkeypatch.setattr(payload, "aligned_empty", remembered)
    honest = Giver("{}:{}".format(*syncer.address), 0, value=3.0)
    with ended(honest), BadNetwork(syncer.address, THIN) as proxy:
        taken.clear()
        killed = child(give_slowly, "{}:{}".format(*proxy.address))
        killed_in_the_middle(monkeypatch, killed)
        lost = lambda: [values["learner"] for values in noted(syncer, "learner_lost")]  # noqa: E731
        until(lambda: 1 in lost(), "the offer to break")
        assert killed.wait() == -signal.SIGKILL
        assert not noted(syncer, "round")
        honest.give(4)
        delivery = honest.next(events.UpdateArrived)
        assert all((piece == 3.0).all() for piece in delivery.fragments[0])
        until(lambda: noted(syncer, "round"), "the record of the round")
        [merged] = noted(syncer, "round")
        assert (merged["learners"], merged["quorum"]) == ([0], 1)
        until(lambda: taken[0]() is None, "the memory of the half fragment to be let go of")


@pytest.mark.parametrize("another", [True, False])
def test_a_donor_killed_in_the_middle_costs_the_joiner_only_its_donation(another, monkeypatch):
    end, killed = SyncerEnd(terms=THREE), child(donate_slowly, "")
    until(lambda: killed.said().endswith("\n"), "the donor's port")
    target = ("127.0.0.1", int(killed.said()))
    with ended(end), Steps(LARGE_STATE, inner=LARGE_INNER) as good, BadNetwork(target, THIN) as proxy:
        taken = killed_in_the_middle(monkeypatch, killed)
        ports = [proxy.address[1], int(good.address.rpartition(":")[2])][: 1 + another]
        peers = [with_client(end.address, 1 + n, p) for n, p in enumerate(ports)]
        with ended(late := with_client(end.address, 0), *peers):
            for n, peer in enumerate(peers):
                joined(end, peer, number=1 + n)
            found = ProcessRecovery(late.client, LARGE_INNER, Security(), RemoteConfig(), LearnerStates(None))
            state = found.inner_state((3, 4))
            assert len(taken) >= 2
            assert (state is not None) is another
            until(lambda: notes(end), "the note")
            assert notes(end)[0]["inner_state"] == ("peer" if another else "fresh")


def test_a_joiner_that_reads_nothing_keeps_neither_the_donor_s_steps_nor_the_next_joiner():
    with (
        Steps(LARGE_STATE, longest=1.0, inner=LARGE_INNER) as donor,
        # Else gRPC may measure the loopback, and take in all 16 MB for a reader that reads nothing.
        grpc.insecure_channel(donor.address, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        wanted = map(cut_message, LARGE_INNER.needs)
        request = pb.DonationRequest(versions=(3, 4), wanted=wanted).SerializeToString()
        idle = channel.unary_stream(wire.DONATE)(request)
        next(idle)  # the header, and no more
        step = InnerStateWanted((), concurrent.futures.Future())
        donor.inbox.put(step)
        assert step.answer.result(TIMEOUT) is LARGE_STATE, "the worker is at its next boundary"

        def given():
            got = error_or(lambda: ask(donor.address, inner=LARGE_INNER))
            return isinstance(got, InnerState)

        until(given, "a donation to another")
        with pytest.raises(grpc.RpcError) as raised:
            list(idle)
        assert raised.value.code() is grpc.StatusCode.CANCELLED


def error_or(function):
    """What it gives, or the error that it raises."""
    try:
        return function()
    except grpc.RpcError as error:
        return error


if __name__ == "__main__":  # in a child
    globals()[sys.argv[1]](sys.argv[2])
