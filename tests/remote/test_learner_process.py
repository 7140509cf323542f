"""How a learner's process ends, without another process: a syncer of the test's own is at the other end."""

import concurrent.futures
import threading

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.ports import reserved_port
from ddiloco.remote.learner.process import LearnerProcess
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.run.recipes import assembly_of
from tests.remote.ends import TIMEOUT, SyncerEnd, ended, until
from tests.workbench import experiment

pytestmark = pytest.mark.usefixtures("one_device")
LIMIT = 4 * TIMEOUT  # with all that is compiled


@pytest.fixture
def begun(data_dir):
    """Begins a learner; gives its assembly, where it looks for a syncer, its result and what stops it."""
    e = experiment(data_dir, driver="remote", remote={"longest_backoff": 0.25, "donor_port": None})
    assembly, stop = assembly_of(e), threading.Event()
    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{port}"
        result = pool.submit(LearnerProcess(assembly, Security()).run, 0, address, stop, print)
        yield assembly, address, result, stop
        stop.set()


def syncer_at(address, assembly, **more):
    return SyncerEnd(terms=terms_of(assembly.experiment, assembly.layout), address=address, **more)


def test_one_that_was_never_let_in_is_refused_for_good(begun):
    assembly, address, result, _ = begun
    refused = pytest.raises(ConfigError, match=f"{address} refused learner 0: the syncer asks for another")
    with ended(syncer_at(address, assembly, security=Security("the token of this run"))), refused:
        result.result(LIMIT)


@pytest.mark.parametrize("other", [{"run": "b" * 32}, {"security": Security("the token of another run")}])
def test_one_that_was_let_in_fails_where_another_s_syncer_refuses_it_so_that_it_begins_again(begun, other):
    assembly, address, result, _ = begun
    syncer = syncer_at(address, assembly, run="a" * 32)
    until(lambda: syncer.links, "the learner's join", LIMIT)
    syncer.die()
    with ended(syncer_at(address, assembly, **other)):
        assert result.result(LIMIT).startswith("the syncer refused learner 0: ")


def test_one_that_is_stopped_before_there_is_a_syncer_leaves_no_thread_in_a_call(begun):
    _, _, result, stop = begun
    stop.set()
    assert result.result(LIMIT) is None
    assert "wire-0" not in {thread.name for thread in threading.enumerate()}
