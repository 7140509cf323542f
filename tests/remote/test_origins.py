"""Whose inner state a learner went on with, kept with the state on its way: on the wire and on disk."""

import numpy as np
import pytest

from ddiloco.outer.codecs import ArrayFormat
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.blocks import cut_message
from ddiloco.remote.wire.payload import chunks
from ddiloco.remote.wire.validation import WireError
from ddiloco.storage.learner_state import LearnerStates
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.workers.exchange import InnerState
from ddiloco.workers.resuming import inner_of
from tests.learner_states import state_with
from tests.remote.donors import read_donation

ARRAYS = [np.arange(6, dtype=np.float32)]
FORMAT = InnerFormat([ArrayFormat((6,), np.dtype(np.float32))])
ORIGIN = InnerOrigin(2, 1_700_000_000_000_000, 5)


@pytest.mark.parametrize("origin", [ORIGIN, None])
def test_a_copy_on_disk_says_under_which_number_its_learner_noted_it(origin, tmp_path):
    LearnerStates(tmp_path).keep(state_with(InnerState(7, (3, 4), ARRAYS, origin)))
    assert inner_of(LearnerStates(tmp_path).newest("")).origin == origin


def donation(**told):
    header = pb.DonationHeader(format=FORMAT.fingerprint, step=7, versions=(3, 4), size=24, **told)
    header.arrays.extend(map(cut_message, FORMAT.needs))
    return iter([header.SerializeToString(), *chunks(ARRAYS)])


def test_a_donation_says_under_which_number_its_donor_noted_it():
    given = donation(learner=2, process=ORIGIN.process, number=5)
    assert read_donation(given, (3, 4), FORMAT).origin == ORIGIN
    assert read_donation(donation(), (3, 4), FORMAT).origin is None


def test_a_number_that_no_tape_can_hold_is_refused():
    with pytest.raises(WireError):
        read_donation(donation(learner=2, process=1 << 60, number=5), (3, 4), FORMAT)
