"""A whole fleet in virtual time: a syncer that crashes, partitions, bandwidth, and that all of it repeats."""

import dataclasses
import itertools

import pytest

from ddiloco.goodput.accounting import State
from ddiloco.outer.encoding import Traffic
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.virtual.availability import Change
from ddiloco.virtual.links import LinkQuality
from tests.virtual.small_fleet import BOTH, ONE, TOKENS, TWO, played, run, small_fleet

PAIR = dataclasses.replace(TWO, quorum=2)

WILD = {
    "seconds": (1.0, 1.3),
    "quality": LinkQuality(latency=0.1, bandwidth=1e5, jitter=0.2, loss=0.1, duplicates=0.1),
    "sizes": (1000, 2000),
    "merge_seconds": 0.25,
    "changes": [
        Change(20.0, 1, "fail"),
        Change(30.0, 1, "recover"),
        Change(40.0, 0, "detect"),
        Change(45.0, 0, "step", 0.5),
    ],
    "noise": lambda rng: rng.uniform(0.5, 1.5),
}
WILD_POLICY = dataclasses.replace(
    TWO, num_fragments=2, silence_timeout=10.0, offer_timeout=4.0, resend_timeout=4.0
)


def wild(seed):
    told = played(WILD_POLICY, 60, seed=seed, **WILD)
    return told.all


def test_the_same_seed_tells_the_same_to_the_bit_and_another_one_another_story():
    first = wild(2)
    assert first == wild(2)
    assert first != wild(3)
    assert {"drop", "round", "learner_lost", "return", "bytes"} <= {told[0] for told in first}


@pytest.mark.parametrize("when", [4.25, 6.5])
def test_a_crash_of_the_syncer_in_a_merge_loses_that_merge_and_no_work_of_a_learner(when):
    fleet, told = small_fleet(PAIR, 24, merge_seconds=3.0)
    fleet.calendar.at(when, fleet.syncer.crash)
    fleet.calendar.at(10.25, fleet.syncer.restart)
    run(fleet)
    # The round under way since 4.0 is merged again: those who are back at 11.0 report at 12.0 all they hold.
    assert told.of("merge")[0] == (15.0, 4, 1)
    [first, *_] = told.of("round")
    assert (first[1]["learners"], first[1]["tokens"]) == ([0, 1], 2 * 12 * TOKENS)
    assert [version for *_, version in told.of("merge")] == list(range(1, 1 + len(told.of("merge"))))


def test_a_commit_stands_though_the_syncer_dies_before_it_knows_of_it():
    fleet, told = small_fleet(TWO, 12, merge_seconds=1.0)

    def die_once(merge, left_out, now):
        told.all.append(("merge", now, merge.round.step, merge.version))
        if merge.version == 1:
            fleet.syncer.crash()
            fleet.calendar.after(0.5, fleet.syncer.restart)

    told.merged = die_once
    run(fleet)
    assert [(step, version) for _, step, version in told.of("merge")] == [(4, 1), (8, 2), (12, 3)]
    assert [values["version"] for _, values in told.of("round")] == [2, 3]  # nobody was told of the first
    first = [(time, learner) for time, learner, version in told.of("update") if version == 1]
    assert first == [(6.0, 0), (6.0, 1)]  # with their return


def test_while_the_syncer_is_away_learners_step_on_and_then_rejoin_by_themselves():
    fleet, told = small_fleet(PAIR, 24, merge_seconds=3.0)
    fleet.calendar.at(5.5, fleet.syncer.crash)
    fleet.calendar.at(10.25, fleet.syncer.restart)
    run(fleet)
    assert told.step_ends(0)[:12] == told.step_ends(1)[:12] == [float(n) for n in range(1, 13)]
    assert told.of("return") == [(11.0, 0, 2), (11.0, 1, 2)]
    ready = [(time, values["incarnation"]) for time, values in told.of("learner_ready")]
    assert ready == [(0.0, 1), (0.0, 1), (11.0, 2), (11.0, 2)]
    assert told.of("round")[-1][1]["learners"] == [0, 1]


def test_a_second_restart_changes_nothing_and_without_one_nobody_is_served():
    fleet, told = small_fleet(TWO, 8)
    fleet.syncer.restart()
    fleet.calendar.at(1.5, fleet.syncer.crash)
    fleet.run(stop=lambda: fleet.calendar.now > 100.0)
    assert not fleet.over
    assert told.step_ends(0)[-1] == 8.0
    assert told.of("merge") == []


def test_in_a_partition_the_others_go_on_and_once_it_is_healed_the_learner_takes_part_again():
    policy = dataclasses.replace(BOTH, interval=2, silence_timeout=4.0, offer_timeout=2.0, resend_timeout=2.0)
    fleet, told = small_fleet(policy, 40)
    fleet.calendar.at(4.5, fleet.cut, 1)
    fleet.calendar.at(20.5, fleet.cut, 1, False)
    run(fleet)
    in_merges = [(time, values["learners"]) for time, values in told.of("round")]
    assert [learners for time, learners in in_merges if time < 4.5] == [[0, 1]] * 2
    [(silent_at, _)] = told.of("learner_silent")
    assert silent_at == 4.0 + policy.silence_timeout
    assert {tuple(learners) for time, learners in in_merges if 4.5 < time < 20.5} == {(0,)}
    [(back, _)] = told.of("learner_returned")
    assert 20.5 < back <= 20.5 + policy.heartbeat + 1
    assert in_merges[-1][1] == [0, 1]
    assert not told.of("learner_lost")


def test_the_syncer_hears_of_a_death_through_no_link():
    fleet, told = small_fleet(TWO, 12, changes=[Change(2.5, 1, "fail")], notice=2.0)
    fleet.calendar.at(1.5, fleet.cut, 1)
    run(fleet)
    assert told.of("learner_lost")[0][0] == 4.5


def test_bandwidth_delays_welcome_offer_and_update_each_by_size_over_bandwidth():
    sizes, bandwidth = (64, 192), 256.0
    policy = dataclasses.replace(ONE, num_fragments=2)
    told = played(policy, 4, quality=LinkQuality(bandwidth=bandwidth), sizes=sizes)
    # The welcome takes (64 + 192) / 256 s. Fragment 1 is due at step 2, fragment 0 at step 4; both are asked
    # for two steps earlier, and so leave with the step.
    assert told.step_ends(0) == [2.0, 3.0, 4.0, 5.0]
    assert told.of("merge") == [(3.75, 2, 1), (5.25, 4, 1)]
    assert told.of("update")[0] == (4.5, 0, 1)
    offered = [("bytes", 0, 192, 0), ("bytes", 0, 64, 0)]
    assert [each for each in told.all if each in offered] == offered


def test_a_thin_link_carries_a_welcome_and_an_update_once_however_often_they_are_asked_for():
    policy = dataclasses.replace(ONE, resend_timeout=2.0)
    thin = LinkQuality(bandwidth=5.0)  # 20 s for the fragment, either way
    told = played(policy, 120, quality=thin, sizes=(100,))
    merges = len(told.of("merge"))
    assert merges > 2
    assert sum(received for _, _, received in told.of("bytes")) == 100 * (1 + merges)


def thin_one(way, steps):
    """A fleet, what it told, and the link of learner 1, `up` or `down`, that is too thin for it."""
    fleet, told = small_fleet(dataclasses.replace(TWO, num_fragments=2), steps, sizes=(100, 100))
    link = getattr(fleet.places[1], way)
    link.quality = LinkQuality(bandwidth=20.0)  # 5 s for a fragment, of which one is due every 2 s
    return fleet, told, link


def test_an_offer_that_an_update_overtakes_while_it_waits_for_its_link_is_not_sent():
    fleet, told, thin = thin_one("up", 60)
    run(fleet)
    sent = [sum(up for m, up, _ in told.of("bytes") if m == learner) for learner in (0, 1)]
    assert sent[0] == 100 * (60 // 2 + 1)  # one fragment is due again at the last step
    assert sent[1] == 20 * (thin.free_at - 2.0)  # it is never idle from its first offer on
    assert thin.free_at < fleet.calendar.now + 5.0  # nor does anything queue up


def test_an_update_that_waits_for_its_link_gives_way_to_a_newer_one():
    fleet, told, thin = thin_one("down", 120)
    run(fleet)
    newest, here = ([v for _, m, v in told.of("update") if m == learner][-1] for learner in (0, 1))
    assert here >= newest - 2
    assert thin.free_at < fleet.calendar.now + 5.0


def test_updates_that_wait_for_their_link_are_lost_with_the_syncer():
    fleet, _, thin = thin_one("down", 120)
    fleet.calendar.at(60.5, fleet.syncer.crash)
    fleet.run(stop=lambda: fleet.calendar.now > 200.0)
    assert thin.free_at < 60.5 + 5.0


def test_what_is_lost_is_sent_again_over_a_thin_link():
    policy = dataclasses.replace(ONE, resend_timeout=2.0)
    fleet, told = small_fleet(policy, 8, quality=LinkQuality(bandwidth=1000.0), sizes=(100,))
    down = fleet.places[0].down
    fleet.calendar.at(4.05, down.cut.add, 0)
    fleet.calendar.at(5.0, down.cut.clear)
    run(fleet)
    assert next(version for *_, version in told.of("update")) == 1


def test_latency_counts_once_each_way():
    told = played(ONE, 8, quality=LinkQuality(latency=0.125))
    # Joined at 0.125, welcomed at 0.25. Asked for in time, the offer comes with the report of step 4.
    assert told.step_ends(0)[:4] == [1.25, 2.25, 3.25, 4.25]
    assert told.of("merge")[0] == (4.25 + 0.125, 4, 1)
    assert told.of("update")[0] == (4.25 + 2 * 0.125, 0, 1)


def test_who_waits_for_a_fragment_on_its_way_waits_for_the_network_and_else_for_peers():
    quality, sizes = LinkQuality(bandwidth=100.0), (50,)
    told = played(BOTH, 4, seconds=(1.0, 2.0), quality=quality, sizes=sizes)
    # Welcomed at 0.5; the offer of step 4 takes until 5.0, that of the other until 9.0, the update until 9.5.
    assert told.of("merge") == [(9.0, 4, 1)]
    assert told.states(0)[-2:] == [(0.5, State.STEPPING), (4.5, State.FINISHED)]
    told = played(BOTH, 5, seconds=(1.0, 2.0), quality=quality, sizes=sizes)
    assert told.states(0)[-5:] == [
        (4.5, State.WAITING_FOR_NETWORK),
        (5.0, State.WAITING_FOR_PEERS),
        (9.0, State.WAITING_FOR_NETWORK),
        (9.5, State.STEPPING),
        (10.5, State.FINISHED),
    ]


def test_merges_that_take_longer_than_is_between_rounds_are_made_one_after_the_other():
    """A round is due each second and its merge takes a second and a half."""
    policy = dataclasses.replace(TWO, num_fragments=4)
    told = played(policy, 120, merge_seconds=1.5)
    times = [time for time, *_ in told.of("merge")]
    assert min(later - at for at, later in itertools.pairwise(times)) >= 1.5
    assert 0.9 * 120 / 1.5 < len(times) <= (times[-1] - 1.0) / 1.5


def test_an_offer_that_overtakes_its_learners_first_report_waits_for_it():
    """As in the drivers of real time; where it was dropped, its round waited for another."""
    fleet, told = small_fleet(changes=[Change(99.0, 0, "join")])  # who speaks here is the test
    for event in (
        events.LearnerJoined(0, 1),
        events.LearnerReady(0, 1, 0, (0,)),
        events.FragmentArrived(RoundId(4, 0), Contribution(0, 1, 0, 0, 4, 4, 40)),
        events.StepReported(Report(0, 1, 4, (FragmentCounters(0, 4, 40),))),
    ):
        fleet.syncer.take(event)
    fleet.calendar.advance()
    assert not told.of("drop")
    assert told.of("merge")


def test_a_syncer_that_crashed_does_not_wait_for_the_merges_that_were_lost():
    fleet, told = small_fleet(TWO, 12, merge_seconds=100.0)
    fleet.calendar.at(6.5, fleet.syncer.crash)
    fleet.calendar.at(7.25, fleet.syncer.restart)
    run(fleet)
    assert told.of("merge")[0] == (109.0, 8, 1)  # they rejoin at 8.0, and report at 9.0 what they hold


def test_bytes_that_vanish_are_not_received():
    fleet, told = small_fleet(TWO, 8, sizes=(100,))
    fleet.calendar.at(4.5, fleet.places[1].down.cut.add, 0)
    run(fleet)
    received = [(learner, count) for learner, _, count in told.of("bytes") if count]
    assert received == [(0, 100), (1, 100), (0, 100), (1, 100), (0, 100)]  # welcomes, version 1, version 2


@pytest.mark.parametrize(("difference", "after"), [(7, 14), (26, 100)])
def test_after_an_update_that_was_lost_come_two_small_differences_or_the_version(difference, after):
    fleet, told = small_fleet(TWO, 12)
    fleet.syncer.arrays.traffic = Traffic(version=(100,), offers=((0,),), difference=(difference,))
    down = fleet.places[1].down
    fleet.calendar.at(3.5, down.cut.add, 0)
    fleet.calendar.at(4.5, down.cut.clear)
    run(fleet)
    received = [[count for m, _, count in told.of("bytes") if m == n and count] for n in (0, 1)]
    one = difference
    assert received == [[100, one, one, one], [100, after, one]]  # welcome, version 1 unless it is lost, 2, 3


def test_a_run_that_does_not_end_is_told_after_so_many_events():
    fleet, _ = small_fleet(TWO, None)
    with pytest.raises(TimeoutError, match="not over after 500 events"):
        fleet.run(max_events=500)


def test_a_run_ends_when_nothing_is_left_to_happen():
    fleet, told = small_fleet(ONE, 12, changes=[Change(2.5, 0, "fail")], notice=1.0)
    fleet.run()
    assert not fleet.over
    assert told.of("learner_lost") == [(3.5, {"learner": 0, "incarnation": 1, "reason": "died"})]
