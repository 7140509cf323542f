"""Learners that give their inner optimizer state, and those that ask for it, at a real wire."""

import contextlib
import dataclasses
import queue
import threading

import jax
import numpy as np

from ddiloco.remote.learner import donation as donations
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.recovery import ProcessRecovery
from ddiloco.remote.wire.security import Security
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage.learner_state import LearnerStates
from ddiloco.workers.exchange import InnerState, InnerStateWanted
from tests.learner_states import needs_all, state_with
from tests.remote.ends import TERMS, TIMEOUT, LearnerEnd

LEAVES = (
    jax.ShapeDtypeStruct((), np.int32),
    jax.ShapeDtypeStruct((500, 700), np.float32),  # more than a chunk
    jax.ShapeDtypeStruct((0, 3), np.float32),
)
FORMAT = InnerFormat(LEAVES)
OF_A_HOST = InnerFormat(LEAVES, FORMAT.needs)  # of several, which happens to need all
THREE = dataclasses.replace(TERMS, num_learners=3, max_learners=3)


def state(value, step=7, versions=(3, 4)):
    """An inner state that holds its value."""
    return InnerState(step, versions, [np.full(leaf.shape, value, leaf.dtype) for leaf in LEAVES])


class Steps:
    """A donor's worker: answers a wish once it holds the versions asked for."""

    after = 0.0  # seconds that a step of its takes

    def __init__(self, given, security=None, longest=TIMEOUT, inner=FORMAT, others=(), boundary=0.0):
        self.inbox, self.wishes = queue.SimpleQueue(), []
        self.donor = Donor(security or Security(), 20.0, others=lambda: others)
        self.address = f"127.0.0.1:{self.donor.start('127.0.0.1')}"
        self.given = given
        self.donor.attach(self.inbox, inner, longest, lambda: boundary)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (wish := self.inbox.get()) is not None:
            assert isinstance(wish, InnerStateWanted)
            self.wishes.append(wish)
            threading.Event().wait(self.after)
            if self.given is not None and wish.answer.set_running_or_notify_cancel():
                failed = isinstance(self.given, Exception)
                (wish.answer.set_exception if failed else wish.answer.set_result)(self.given)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.inbox.put(None)
        self.donor.stop()


def read_donation(messages, versions, inner):
    """The inner state in what a donor of one host sends, as a Donation takes it."""
    header = donations._header(messages, versions, inner)
    taken = donations._Taken(donations.Recipient(inner, Security(), 20.0))
    taken.add(header, messages)
    return taken.state(header)


def ask(address, versions=(3, 4), inner=FORMAT, security=None, timeout=TIMEOUT):
    donation = donations.Donation(
        donations.Recipient(inner, security or Security(), 20.0), address, versions, timeout
    )
    with contextlib.closing(donation):
        return donation.open().take()


def assert_same(ours, theirs):
    for one, other in zip(ours.arrays, theirs.arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    assert (ours.step, ours.versions) == (theirs.step, theirs.versions)


def with_client(address, learner, donor_port=0, process=100):
    """A learner's end that names a donor's port, and recovers by its client."""
    end = LearnerEnd(address, learner, process, donor_port=donor_port)
    assert end.client.accepted.wait(TIMEOUT)
    return end


def notes(syncer):
    return syncer.noted("recovered")


def keep(folder, state, run=""):
    """Keeps it in the folder, in the learner's own state."""
    LearnerStates(folder).keep(state_with(state, run))


def recovery(end, folder=None, stepping=lambda steps: None, make=ProcessRecovery, inner=FORMAT, **changes):
    config = dataclasses.replace(RemoteConfig(), **changes)
    return make(
        end.client,
        inner,
        Security(),
        config,
        LearnerStates(folder, None if inner.whole else needs_all),
        stepping,
    )
