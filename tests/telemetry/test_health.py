"""What an engine's probes are told."""

import urllib.error
import urllib.request

import pytest

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.telemetry.health import SHORTEST, Health, serve
from ddiloco.telemetry.records import StateChanged, StepDone


def ask(server, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def served():
    now = [0.0]
    health = Health(clock=lambda: now[0])
    server = serve("127.0.0.1:0", health)
    yield health, server, now
    server.shutdown()
    server.server_close()


def test_a_learner_is_ready_once_it_steps(served):
    health, server, _ = served
    passed = []
    record = health.watching(passed.append)
    assert ask(server, "/live") == (200, "ok\n")
    assert ask(server, "/ready") == (503, "not ready yet\n")
    done = StepDone(learner=0, step=1, time=0.0, tokens=1, metrics={})
    record(done)
    assert passed == [done]
    assert ask(server, "/ready") == (200, "ok\n")


def test_a_learner_that_has_stepped_and_steps_no_more_does_not_live(served):
    health, server, now = served
    record = health.watching(lambda one: None)
    for step, time in enumerate([0.0, 100.0, 200.0]):
        now[0] = time
        record(StepDone(learner=0, step=step, time=time, tokens=1, metrics={}))
    now[0] += 999.0  # not yet ten times the median
    assert ask(server, "/live")[0] == 200
    now[0] += 2.0
    assert ask(server, "/live") == (503, "no step for 1001 s\n")
    health.close()  # the run is over
    assert ask(server, "/live")[0] == 200


def test_one_slow_step_does_not_hide_that_a_later_one_hangs():
    now = 0.0
    health = Health(3.0, clock=lambda: now)
    record = health.watching(lambda one: None)
    record(StateChanged(0, State.STEPPING, 0.0))
    for now in (20.0, 21.0, 22.0, 23.0):  # the first also compiled
        record(StepDone(learner=0, step=1, time=now, tokens=1, metrics={}))
    now = 33.0
    assert health.hanging() is None
    now = 33.5
    assert health.hanging() == 10.5


def test_a_learner_whose_first_step_hangs_does_not_live():
    """As where devices cannot reach each other: what they exchange first is a step's."""
    now = 0.0
    health = Health(3.0, clock=lambda: now)
    record = health.watching(lambda one: None)
    now = 100 * SHORTEST
    assert health.hanging() is None, "it compiles"
    now = 0.0
    record(StateChanged(0, State.STEPPING, 0.0))
    now = SHORTEST
    assert health.hanging() is None
    now = SHORTEST + 1.0
    assert health.hanging() == now


@pytest.mark.parametrize("state", [State.FINISHED, State.WAITING_FOR_PEERS])
def test_a_learner_that_waits_for_the_syncer_does_not_hang(served, state):
    health, _, now = served
    record = health.watching(lambda one: None)
    for step in (1, 2):
        now[0] = float(step)
        record(StepDone(learner=0, step=step, time=now[0], tokens=1, metrics={}))
    record(StateChanged(0, state, 2.0))
    now[0] = 100 * SHORTEST
    assert health.hanging() is None
    record(StateChanged(0, State.STEPPING, now[0]))
    assert health.hanging() is None
    now[0] += SHORTEST + 1.0
    assert health.hanging() == SHORTEST + 1.0, "it does not wait any more"


def test_other_questions_are_not_answered(served):
    assert ask(served[1], "/")[0] == 404


def test_a_port_that_is_taken_is_told(served):
    with pytest.raises(ConfigError, match=r"health: 127\.0\.0\.1:.*: cannot be listened on"):
        serve(f"127.0.0.1:{served[1].server_port}", Health())
