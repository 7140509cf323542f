"""A syncer's actor: whose arrays it keeps, and what it hands out of the fragments."""

import json

import pytest

from ddiloco.data.shards import ShardAssignment
from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor

FIRST, SECOND = RoundId(4, 0), RoundId(5, 1)


class Decided:
    """A core that decides what a test says."""

    policy = SyncPolicy(2, num_fragments=2)

    def __init__(self):
        self.next = []

    def handle(self, event, now):
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def incarnation(self, learner):
        return 1


class Driver:
    """Remembers what it is given."""

    def __init__(self):
        self.sent, self.merges, self.records, self.calls = [], [], [], []

    def handled(self, event, decided, now):
        self.calls.append("handled")

    def refuse(self, event, error):
        return actions.Drop(0, str(error))

    def remember(self, incarnations):
        self.calls.append(incarnations)
        return True

    def deliver(self, receiver, delivery):
        self.calls.append("sent")
        self.sent.append((receiver, delivery))

    def began(self, learner, incarnation):
        self.calls.append((learner, incarnation))

    def merge(self, merge, given):
        self.merges.append([arrays for _, arrays in given])

    def record(self, name, values):
        self.records.append((name, values))

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def actor(driver):
    return SyncerActor(Decided(), driver, {p: FragmentVersion(0, f"{p} at 0") for p in range(2)})


def contribution(learner, incarnation=1):
    return Contribution(learner, incarnation, fragment=0, version=0, step=4, steps=4, tokens=40)


def arrived(learner, round_id=FIRST, incarnation=1):
    return events.FragmentArrived(round_id, contribution(learner, incarnation))


def merge(*learners, round_id=FIRST):
    return actions.Merge(round_id, 1, tuple(contribution(learner) for learner in learners))


def offer(actor, event, arrays, *decided):
    actor.core.next = list(decided)
    actor.take_offer(event, arrays, 0.0)


def test_a_merge_takes_its_offers_in_their_order_and_they_are_kept_no_longer(actor, driver):
    for learner in (0, 1):
        offer(actor, arrived(learner), f"of {learner}")
    offer(actor, arrived(0, incarnation=2), "of 0, later")
    actor.perform([merge(1, 0)])
    assert driver.merges == [["of 1", "of 0"]] and list(actor.offers.values()) == ["of 0, later"]


def test_the_first_of_two_arrivals_of_an_offer_is_merged(actor, driver):
    offer(actor, arrived(0), "of 0")
    offer(actor, arrived(0), "a second one", actions.Drop(0, "unexpected fragment", FIRST))
    actor.perform([merge(0)])
    assert driver.merges == [["of 0"]]
    assert driver.records == [("drop", {"learner": 0, "reason": "unexpected fragment"})]


def test_what_is_released_does_not_take_with_it_another_offer_of_its_learner(actor, driver):
    offer(actor, arrived(0), "of 0")
    offer(actor, arrived(0, incarnation=2), "of its next process", actions.Release(contribution(0, 2)))
    actor.perform([merge(0)])
    assert driver.merges == [["of 0"]]


def test_an_offer_on_which_the_core_raises_is_dropped_with_its_arrays(actor, driver):
    actor.core.next = LookupError("no such learner")
    actor.take_offer(arrived(0), "of 0", 0.0)
    assert not actor.offers and driver.records == [("drop", {"learner": 0, "reason": "no such learner"})]


def test_a_merge_of_what_never_came_is_a_mistake(actor):
    with pytest.raises(KeyError):
        actor.perform([merge(0, 2)])


def test_who_joins_is_durable_before_it_is_welcomed_after_one_write_for_all_that_join_together(actor, driver):
    actor.core.next = [actions.Send(((0, 1),), events.NotMember(1))]
    actor.handle(events.LearnerJoined(0, 1), events.LearnerJoined(1, 1), now=0.0)
    assert driver.calls == ["handled", "handled", ((0, 1), (1, 1)), "sent", "sent"]
    actor.handle(events.LearnerJoined(0, 1), now=0.0)
    assert driver.calls[5:] == ["handled", "sent"]  # it is known already


def handed_out(actor, driver, event):
    actor.perform([actions.Send(((0, 1),), event)])
    _, delivery = driver.sent[-1]
    return list(delivery.fragments), delivery.difference


def merged(actor, version, **made):
    made = NextVersion(f"at {version}", {}, difference=f"to {version}", **made)
    finished = events.MergeFinished(RoundId(version, 0))
    actor.perform(actor.merged(finished, version, made, {"merge_seconds": version}, 0.0))


def test_a_version_that_the_core_does_not_tell_of_yet_is_not_handed_out_in_place_of_the_one_before(
    actor, driver
):
    """A part's core tells of a merge once the authority knows of it; learners join and ask meanwhile."""
    merged(actor, 1)
    merged(actor, 2)
    welcome = events.Welcomed(1, 1, (1,), (1,), fragments=(0,))
    assert handed_out(actor, driver, welcome) == (["at 1"], ())
    assert handed_out(actor, driver, events.UpdateArrived(0, 1, 1)) == (["at 1"], "to 1")
    assert handed_out(actor, driver, events.UpdateArrived(0, 2, 2)) == (["at 2"], "to 2")
    assert actor.newest() == ["at 2", "1 at 0"]
    assert handed_out(actor, driver, events.NotMember(1)) == ([], ())


def test_once_a_version_is_published_the_one_before_is_let_go_and_its_merge_is_on_record(actor, driver):
    merged(actor, 1)
    actor.perform([actions.Published("round", {"fragment": 0}, 0)])
    assert driver.records == [("round", {"fragment": 0, "merge_seconds": 1})]
    assert actor.version(0, 0) == actor.version(0, 1) == FragmentVersion(1, "at 1", "to 1")


def test_a_merge_of_which_nothing_came_leaves_the_version_before(actor):
    merged(actor, 0, empty=True)
    assert actor.version(0, 0) == FragmentVersion(0, "0 at 0")


def test_an_actor_that_has_ended_makes_records_of_what_is_decided_and_nothing_else(actor, driver):
    actor.end()
    decided = [actions.Send(((0, 1),), events.NotMember(1)), actions.Record("learner_lost", {}), merge()]
    actor.perform([*decided, actions.Finish()])
    assert (driver.sent, driver.merges, driver.calls) == ([], [], [])
    assert driver.records == [("learner_lost", {})]


def test_a_second_reader_is_welcomed_with_its_place_beside_the_learner_of_its_shard(actor, driver):
    position = {
        "stream": {"num_shards": 2, "records": 10},
        "shards": {"0": ShardAssignment(0, 2, 10).position(None)},
    }
    watermarks = {0: {0: Watermark(1, 3, json.dumps(position))}}
    welcome = events.Welcomed(1, 0, (0, 0), (0, 0))
    found = []
    for learner in (1, 2):
        actor.perform([actions.Send(((learner, 1),), welcome, watermarks)])
        found.append(driver.sent[-1][1].event.data.position)
    assert not found[0] and list(json.loads(found[1])["shards"]) == ["2"]
