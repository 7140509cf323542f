"""For whose offers a merge waits."""

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.asking import worth_waiting
from ddiloco.protocol.estimates import Delay
from ddiloco.protocol.membership import Asked, Member, Membership, MemberState
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.round import Round
from ddiloco.virtual.links import LinkQuality
from tests.protocol.desk import Desk, merges
from tests.virtual.small_fleet import small_fleet

LOST = 48.0  # seconds that a missed offer is worth where its work is lost: half an interval of 24 s
LATE = 24.0  # where it is merged in the next round


def waited_for(
    lags: dict[int, float | None],
    here: int = 1,
    next_quorum: float = 24.0,
    late: tuple[int, ...] = (),
    delivery: float | None = None,
    missed: float = LOST,
):
    """Whom a round waits for, and how long: `here` offers have come, and those with lags are owed."""
    members, r = Membership((0,)), Round(RoundId(24, 0), 1)
    for learner in range(here + len(lags)):
        m = members.admit(Member(learner, 1, heard_at=0.0))
        members.move(m, MemberState.LIVE)
        m.step_time.add(1.0)
        if learner < here:
            r.arrived[learner] = Contribution(learner, 1, 0, 1, 24, 24, 24, 0)
            continue
        r.owed[learner] = Asked(24, 24, 24)
        m.punctual = learner not in late
        if delivery is not None:
            m.delivery.add(delivery)
        if (lag := lags[learner]) is not None:
            m.lag.add(lag)
            m.lag.deviation = 0.0
    return worth_waiting(r, members.live(), missed, next_quorum, now=100.0)


def test_a_delay_follows_the_samples_and_their_deviation():
    delay = Delay()
    delay.add(4.0)
    assert (delay.value, delay.deviation, delay.bound) == (4.0, 2.0, 12.0)
    delay.add(9.0)
    assert (delay.value, delay.deviation) == pytest.approx((5.0, 0.8 * 2.0 + 0.2 * 5.0))


def test_seven_of_eight_are_waited_for_though_they_are_far():
    assert waited_for(dict.fromkeys(range(1, 8), 20.0)) == (set(range(1, 8)), 20.0)


@pytest.mark.parametrize(("missed", "longest"), [(LOST, 6.0), (LATE, 3.0)])
def test_one_of_eight_is_waited_for_as_long_as_it_costs_the_others_less_than_it_gains(missed, longest):
    """An eighth of an interval makes the work of eight an interval older together, which one gains."""
    before, after = longest - 0.1, longest + 0.1
    assert waited_for({7: before}, here=7, missed=missed) == ({7}, before)
    assert waited_for({7: after}, here=7, missed=missed) == (set(), 0.0)
    assert waited_for({63: longest / 8 + 0.1}, here=63, missed=missed) == (set(), 0.0), "of sixty-four"


@pytest.mark.parametrize(("missed", "longest"), [(LOST, 6.0), (LATE, 3.0)])
def test_a_merge_stops_waiting_for_an_offer_that_can_no_longer_gain_what_the_wait_costs(missed, longest):
    assert waited_for({7: 1.0}, here=7, delivery=10.0, missed=missed) == ({7}, longest)


def test_an_offer_may_come_behind_another_one_of_its_learner():
    assert waited_for({1: 1.0}, delivery=4.0) == ({1}, 8.0)
    assert waited_for({1: 9.0}, delivery=4.0) == ({1}, 9.0)


def test_the_near_are_waited_for_and_the_far_are_not():
    assert waited_for({4: 0.5, 5: 1.0, 6: 1.0, 7: 20.0}, here=4) == ({4, 5, 6}, 1.0)


def test_nobody_is_waited_for_beyond_the_fragments_next_quorum():
    assert waited_for(dict.fromkeys(range(1, 8), 20.0), next_quorum=19.0) == (set(), 0.0)


def test_who_was_late_or_never_measured_is_not_waited_for():
    assert waited_for({1: 1.0, 2: 1.0, 3: None}, late=(2,)) == ({1}, 1.0)


def round_of(desk: Desk, step: int, lag: float) -> tuple[list, float]:
    """Learner 0 offers at a step, learner 1 so much later; what was merged, and how long it took."""
    for clock in range(step - 7, step + 1):
        for learner in (0, 1):
            desk.report(learner, clock, at=float(clock), steps=8)
    out = desk.offer(0, (step, 0))
    while not merges(out) and desk.core.next_deadline() < step + lag:
        out += desk.handle(events.Timeout(), at=desk.core.next_deadline())
    out += desk.offer(1, (step, 0), at=step + lag)
    while not merges(out):
        out += desk.handle(events.Timeout(), at=desk.core.next_deadline())
    desk.merged(step, 0)
    return merges(out)[0][2], desk.now - step


def test_whoever_misses_its_time_is_not_waited_for_until_it_keeps_it():
    desk = Desk(learners=2, num_fragments=1, interval=8, quorum=1, gamma=0.0)
    seen = [
        round_of(desk, step, lag)[0] for step, lag in [(8, 2.0), (16, 2.0), (24, 7.5), (32, 2.0), (40, 2.0)]
    ]
    assert seen == [[0], [0, 1], [0], [0], [0, 1]]


def test_whoever_misses_most_rounds_keeps_no_window_open_until_it_is_in_time():
    desk = Desk(learners=2, num_fragments=1, interval=8, quorum=1, gamma=0.5)

    def has_window(step: int, in_time: bool = False) -> bool:
        """Whether a round is open once learner 0 has offered."""
        for clock in range(step - 7, step + 1):
            for learner in (0, 1):
                desk.report(learner, clock, at=float(clock), steps=8)
        if in_time:
            desk.offer(1, (step, 0))
        begun = merges(desk.offer(0, (step, 0)))
        if not begun:
            assert merges(desk.handle(events.Timeout(), at=desk.core.next_deadline()))
        desk.merged(step, 0)
        return not begun

    windows = [has_window(step) for step in range(8, 88, 8)]
    assert windows == [True] * 8 + [False] * 2, "of 1, a fifth is left after eight"
    assert not has_window(88, in_time=True), "both are here"
    assert has_window(96)


@pytest.mark.parametrize(("thin", "share"), [(8, 0.9), (4, 1.0)])
def test_links_that_are_just_full_leave_nobody_out(thin, share):
    """`thin` learners have links of this share of what all fragments take."""
    policy = SyncPolicy(num_learners=8, num_fragments=6, interval=12, quorum=1, rebase=True)
    fleet, told = small_fleet(policy, 240, sizes=(100,) * 6)
    for learner in range(thin):
        for link in (fleet.places[learner].up, fleet.places[learner].down):
            link.quality = LinkQuality(latency=0.01 * learner, bandwidth=50.0 * share)
    fleet.run(max_events=100_000)
    assert fleet.over
    merged = sum(values["tokens"] for _, values in told.of("round"))
    trained = sum(tokens for *_, tokens in told.of("step"))
    assert merged / (6 * trained) > 0.85


def test_a_restarted_syncer_waits_in_its_first_rounds_for_those_that_were_late_before():
    policy = SyncPolicy(num_learners=8, num_fragments=6, interval=12, quorum=1, rebase=True)
    fleet, told = small_fleet(policy, 240, sizes=(100,) * 6)
    for learner in range(8):
        for link in (fleet.places[learner].up, fleet.places[learner].down):
            link.quality = LinkQuality(latency=0.01 * learner, bandwidth=50.0)
    fleet.calendar.at(120.0, fleet.syncer.crash)
    fleet.calendar.at(121.0, fleet.syncer.restart)
    fleet.run(max_events=100_000)
    after = [values["quorum"] for at, values in told.of("round") if at > 121.0 and values["step"] < 240]
    assert after[:6] == [8] * 6 and min(after) >= 7, "later one may come when it no longer pays to wait"


def test_a_last_round_waits_for_the_offers_of_links_that_are_just_full():
    """All fragments are due at once, which takes these links an interval."""
    policy = SyncPolicy(num_learners=8, num_fragments=6, interval=12, quorum=1, rebase=True)
    fleet, told = small_fleet(policy, 240, sizes=(100,) * 6)
    for place in fleet.places.values():
        for link in (place.up, place.down):
            link.quality = LinkQuality(bandwidth=50.0)
    fleet.run(max_events=100_000)
    last = [values["quorum"] for _, values in told.of("round") if values["step"] == 240]
    assert last == [8] * 6
    merged = sum(values["tokens"] for _, values in told.of("round"))
    assert merged > 0.995 * 6 * sum(tokens for *_, tokens in told.of("step"))


def test_one_that_is_back_and_has_yet_to_be_asked_again_is_waited_for():
    r = Round(RoundId(24, 0), 1, awaited=frozenset({2}), window_closes=5.0, awaited_until=10.0, unasked={2})
    assert r.closes(awaits_learners=False) == 10.0
    r.unasked.clear()
    assert r.closes(awaits_learners=False) == 0.0, "it has left"
