"""Both ends of a wire, for tests that need one of each."""

import pytest

from tests.remote.ends import LearnerEnd, SyncerEnd, ended


@pytest.fixture
def ends():
    syncer = SyncerEnd()
    with ended(syncer, learner := LearnerEnd(syncer.address)):
        yield syncer, learner
