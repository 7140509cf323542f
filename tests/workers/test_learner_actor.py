"""A learner's actor: what its core's actions do to the arrays, and with which fragments."""

import types

import pytest

from ddiloco.data.errors import DataError
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.workers.exchange import InnerState
from ddiloco.workers.learner_actor import LearnerActor


class Core:
    """A core that decides what a test says."""

    policy = SyncPolicy(2, num_fragments=2)

    def __init__(self):
        self.next = []
        self.clock = 4
        self.offered = set()

    def handle(self, event, now):
        return self.next


class Log:
    """The arrays and the driver of an actor, which remember the calls."""

    def __init__(self):
        self.calls = []
        self.inner, self.at = None, {"batches": 3}

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def handled(self, event, decided, now):
        pass

    def inner_state(self, versions):
        self.calls.append(("inner_state", versions))
        return self.inner

    def position(self):
        return self.at

    def offered(self, fragment, steps):
        return f"offer of {fragment} after {steps}"

    def step(self, clock):
        self.calls.append(("step", clock))
        return 10, {}


@pytest.fixture
def it():
    core, log = Core(), Log()
    return types.SimpleNamespace(core=core, log=log, actor=LearnerActor(core, log, log))


def handle(it, event, fragments, *decided):
    it.core.next = list(decided)
    it.log.calls.clear()
    it.actor.handle(event, 0.0, fragments)
    return it.log.calls


def welcome(*fragments):
    ones = (1,) * len(fragments)
    return events.Welcomed(1, 4, ones, ones, fragments=fragments)


def test_a_learner_begins_with_the_fragments_of_all_its_welcomes_and_the_inner_state_that_it_is_given(it):
    assert not handle(it, welcome(1), ["theta of 1"])
    it.log.inner = InnerState(4, (1, 1), "inner arrays", trained=7)
    adopt = actions.AdoptAll(4, (1, 1), None)
    found = handle(it, welcome(0), ["theta of 0"], adopt)
    assert found == [("inner_state", (1, 1)), ("adopt", ["theta of 0", "theta of 1"], "inner arrays")]
    assert it.actor.trained == 7
    it.actor.step()
    assert it.log.calls[-1] == ("step", 4) and it.actor.trained == 8


def test_the_fragments_of_a_welcome_that_the_core_drops_are_not_begun_with(it):
    handle(it, welcome(0, 1), ["old 0", "old 1"], actions.Drop(0, "welcome of another incarnation"))
    found = handle(it, welcome(0, 1), ["theta of 0", "theta of 1"], actions.AdoptAll(4, (1, 1), ""))
    assert found[1:] == [("adopt", ["theta of 0", "theta of 1"], None), ("draw_from", None)]


def test_an_update_is_applied_with_the_fragment_that_came_with_it(it):
    update = events.UpdateArrived(1, 2, 8)
    found = handle(it, update, ["theta of 1"], actions.ApplyUpdate(1, 2, 0.5, 3, True))
    assert found == [("apply", 1, 0.5, "theta of 1", 3, True)]


def test_a_step_has_the_number_of_updates_since_the_step_before_among_its_metrics(it):
    assert "updates" not in it.actor.step()[1]
    for fragment in (0, 1):
        update = events.UpdateArrived(fragment, 2, 8)
        handle(it, update, ["theta"], actions.ApplyUpdate(fragment, 2, 0.0))
    assert it.actor.step()[1]["updates"] == 2
    assert "updates" not in it.actor.step()[1]


def test_a_shard_that_welcomes_again_replaces_its_fragments_by_those_that_came(it):
    replaced = [actions.ApplyUpdate(p, 1, mixing=0.0) for p in (0, 1)]
    assert not handle(it, welcome(0), ["theta of 0"])
    found = handle(it, welcome(1), ["theta of 1"], *replaced, actions.DrawFrom('{"batches": 5}'))
    assert found == [
        ("apply", 0, 0.0, "theta of 0", None, False),
        ("apply", 1, 0.0, "theta of 1", None, False),
        ("draw_from", {"batches": 5}),
    ]


def test_an_offer_is_sent_with_where_the_data_stood_when_it_was_made(it):
    made = Contribution(0, 1, 1, 0, 4, 4, 40, upto=Watermark(1, 4))
    handle(it, events.StepStarted(10), (), actions.MakeOffer(made))
    it.log.at = {"batches": 4}
    [(name, offer, arrays)] = handle(it, events.StepFinished(), (), actions.SendOffer(RoundId(4, 1), made))
    assert (name, arrays) == ("send_offer", "offer of 1 after 4")
    assert offer == events.FragmentArrived(RoundId(4, 1), made)
    assert offer.contribution.upto.position == '{"batches": 3}'


def test_where_the_data_stood_is_kept_as_long_as_the_core_keeps_an_offer_that_was_made_there(it):
    made = [Contribution(0, 1, 1, 0, n, n, 10 * n, upto=Watermark(1, n)) for n in (4, 5, 6)]
    for n, offered in ((0, {4}), (1, {4, 5}), (2, {5, 6})):
        it.core.offered, it.log.at = offered, {"batches": n}
        handle(it, events.StepStarted(10), (), actions.MakeOffer(made[n]))
    for n in (1, 2):
        [(_, offer, _)] = handle(it, events.StepFinished(), (), actions.SendOffer(RoundId(4, 1), made[n]))
        assert offer.contribution.upto.position == f'{{"batches": {n}}}'
    with pytest.raises(KeyError):
        handle(it, events.StepFinished(), (), actions.SendOffer(RoundId(4, 1), made[0]))


@pytest.mark.parametrize("position", ["{", "[" * 100_000, '{"batches": 3}'])
def test_data_that_cannot_go_on_where_they_should_begin_again_with_an_alarm(it, position):
    drawn = []

    def draw_from(position):
        drawn.append(position)
        if position:
            raise DataError("of another stream")

    it.log.draw_from = draw_from
    [(name, problem)] = handle(it, events.Heartbeat(), (), actions.DrawFrom(position))
    assert name == "alarm" and problem.startswith("its data begin again: ")
    assert drawn[-1] is None


def test_what_the_core_says_goes_to_the_shard_that_it_names(it):
    joined = events.LearnerJoined(0, 2)
    decided = actions.SendToSyncer(joined, 1), actions.Drop(0, "stale update"), actions.EndProcess("replaced")
    assert handle(it, events.NotMember(1), (), *decided) == [
        ("send", joined, 1),
        ("record", "drop", {"learner": 0, "reason": "stale update"}),
        ("leave", "replaced"),
    ]
