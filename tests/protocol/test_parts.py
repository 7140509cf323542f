"""A part of a syncer: what a new authority hears of it."""

import pytest

from ddiloco.protocol import actions, events, news
from ddiloco.protocol.authority import Authority
from ddiloco.protocol.membership import Membership
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.protocol.parts import AuthorityCore, FromPart, Part, PartConnected, ToPart
from ddiloco.protocol.policy import ALLOWANCE, SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState

POLICY = SyncPolicy(num_learners=1, num_fragments=3, interval=3, gamma=0.0)
STATE = SyncerState.initial(3)


def test_every_fragment_belongs_to_one_part():
    owned = [p for part in range(4) for p in fragments_of(part, 4, 10)]
    assert sorted(owned) == list(range(10))


def test_a_new_authority_hears_what_was_committed_and_that_a_part_has_no_round_left():
    """Else a run whose authority died after the last round would never end."""
    state = SyncerState((0, 2, 0), (0, 4, 0), lineages=(0, 7, 0))
    part = Part(POLICY, 4, state, [1])
    known = news.Committed(RoundId(4, 1), 2, 7)
    for now in (0.0, 1.0):
        said = part.handle(news.RollCall(), now)
        assert {known, news.Over(), news.Stuck(False)} <= set(said)
        assert news.Over() not in part.handle(news.AllPresent(), now)


def test_an_authority_takes_what_it_did_not_know_and_answers_each():
    authority = Authority(POLICY, 4, SyncerState.initial(3), Membership(range(3)), parts=2)
    committed = news.Committed(RoundId(4, 1), 2, 7)
    for _ in range(2):
        assert authority.hear(committed, 1) == [news.Noted(RoundId(4, 1))]
    assert (authority.merged.versions, authority.merged.lineages) == ((0, 2, 0), (0, 7, 0))


def test_a_part_that_comes_back_on_an_older_disk_has_learners_welcomed_with_what_it_holds():
    """Else they would hold a version that nobody can merge their work on, for the rest of the run."""
    policy = SyncPolicy(num_learners=1, num_fragments=2, interval=2)
    state = SyncerState((2, 2), (6, 7), lineages=(5, 5))
    authority = AuthorityCore(policy, None, state, parts=2)
    older = Part(policy, None, SyncerState((0, 1), (0, 5), lineages=(0, 5)), [1], lineage=6)

    def told(event):
        """What learners are told, and the parts beside."""
        out = authority.handle(event, 1.0)
        for one in [one for one in out if isinstance(one, ToPart) and one.part in (None, 1)]:
            for said in older.handle(one.news, 1.0):
                out += told(FromPart(1, said)) if isinstance(said, news.Word) else [said]
        return [one.event for one in out if isinstance(one, actions.Tell)]

    report = events.StepReported(Report(0, 1, 8, (FragmentCounters(2, 1, 10),) * 2))
    told(events.LearnerJoined(0, 1, 7, (2, 2), (5, 5)))
    assert told(report) == []
    told(PartConnected(1))
    assert (authority.versions, authority.merged_steps) == ((2, 1), (6, 5))
    assert told(report) == [events.NotMember(1)]
    [welcome] = told(events.LearnerJoined(0, 2, 8, (2, 2), (5, 5)))
    assert (welcome.fragments, welcome.versions, welcome.lineages) == ((1,), (1,), (5,))


def test_a_part_says_the_newest_of_each_fragment_once():
    """An authority that knows a merge whose note was lost would take the version before for its loss."""
    part = Part(POLICY, None, STATE, [1, 2], lineage=5)
    report = Report(0, 1, 1, (FragmentCounters(0, 1, 10),) * 3)
    for said in (news.RollCall(), news.AllPresent(), news.Begun(0, 1, 0, (0, 0, 0)), news.Heard(report, 1.0)):
        part.handle(said, 0.0)
    which = RoundId(1, 1)
    part.handle(events.FragmentArrived(which, Contribution(0, 1, 1, 0, 1, 1, 10)), 2.0)
    part.handle(events.MergeFinished(which), 2.5)
    said = [one for one in part.handle(news.RollCall(), 3.0) if isinstance(one, news.Committed)]
    assert said == [news.Committed(which, 1, 5), news.Committed(RoundId(0, 2), 0, 0)]


def test_a_part_waits_longer_for_offers_of_a_learner_whose_welcome_took_long():
    part = Part(SyncPolicy(num_learners=1, num_fragments=3, interval=3, offer_timeout=3.0), None, STATE, [1])
    for told, now in [
        (news.RollCall(), 0.0),
        (news.AllPresent(), 0.0),
        (news.Admitted(0, 1), 0.0),
        (news.Admitted(0, 1), 5.0),  # as the authority repeats it
        (news.Begun(0, 1, 0, (0, 0, 0)), 6.0),
        (news.Heard(Report(0, 1, 1, (FragmentCounters(0, 1, 10),) * 3), None), 6.0),
    ]:
        part.handle(told, now)
    assert part.next_deadline() == 6.0 + 3.0 + ALLOWANCE * 6.0 / 3
    for told, now in [
        (news.Left(0, 1, gone=True), 7.0),
        (news.Begun(0, 2, 1, (0, 0, 0)), 8.0),  # it rejoins with what it holds, without a welcome
        (news.Heard(Report(0, 2, 1, (FragmentCounters(0, 1, 10),) * 3), None), 8.0),
    ]:
        part.handle(told, now)
    assert part.next_deadline() == 8.0 + 3.0 + ALLOWANCE * 6.0 / 3


def test_what_a_part_has_committed_is_durable_before_the_authority_knows_and_told_to_learners_after():
    part = Part(POLICY, None, STATE, [1], lineage=5)
    report = Report(0, 1, 1, (FragmentCounters(0, 1, 10),) * 3)
    for told in (news.RollCall(), news.AllPresent(), news.Admitted(0, 1), news.Begun(0, 1, 0, (0, 0, 0))):
        part.handle(told, 0.0)
    part.handle(news.Heard(report, 1.0), 2.0)
    which = RoundId(1, 1)
    part.handle(events.FragmentArrived(which, Contribution(0, 1, 1, 0, 1, 1, 10)), 2.0)
    assert part.handle(events.MergeFinished(which), 2.5) == [news.Committed(which, 1, 5)]
    assert (part.durable.versions[1], part.durable.merged_steps[1], part.durable.lineages[1]) == (1, 1, 5)
    [welcome] = part.handle(news.Admitted(1, 1), 2.6)
    assert welcome.event.versions == (0,)
    part.handle(news.Noted(which), 2.7)
    assert part.merged == part.durable
    [welcome] = part.handle(news.Admitted(2, 1), 2.8)
    assert welcome.event.versions == (1,)


def test_a_part_gives_no_round_up_before_it_knows_all_learners_again():
    """Learner 1 is done and has given; learner 0, which the roll call names later, has steps to do."""
    policy = SyncPolicy(num_learners=2, num_fragments=2, interval=8, quorum=1)
    state = SyncerState((11, 11), (96, 92))
    authority, part = AuthorityCore(policy, 100, state, parts=2), Part(policy, 100, state, [1])
    heard = []

    def tell(event):
        for out in authority.handle(event, 1.0):
            if isinstance(out, ToPart) and out.part in (None, 1):
                for said in part.handle(out.news, 1.0):
                    heard.append(said)
                    if isinstance(said, news.Word):
                        tell(FromPart(1, said))

    def has(learner, step, steps):
        return events.StepReported(Report(learner, 1, step, (FragmentCounters(11, steps, 10 * steps),) * 2))

    tell(PartConnected(1))
    for learner, step, steps in ((1, 99, 0), (0, 95, 1)):
        tell(events.LearnerJoined(learner, 1))
        tell(events.LearnerReady(learner, 1, step, (11, 11)))
        tell(has(learner, step, steps))
    tell(has(1, 100, 0))
    assert part._rounds.open
    tell(PartConnected(1))  # its connection is made again
    assert part._rounds.open and news.Over() not in heard
    assert not any(isinstance(said, actions.Record) and said.name == "round_abandoned" for said in heard)


@pytest.mark.parametrize("silent", [False, True])
def test_a_part_that_waits_for_all_does_not_merge_without_a_learner_that_takes_its_own_place(silent):
    """Learner 0 is told that it is no member, and rejoins with what it holds, to be told of in one message.

    After a silence of both it is waited for, as the last.
    """
    policy = SyncPolicy(num_learners=2, num_fragments=1, interval=2, quorum=None, silence_timeout=8.0)
    authority = AuthorityCore(policy, None, SyncerState.initial(1), parts=1)
    part = Part(policy, None, SyncerState.initial(1), [0])
    said = []

    def tell(event, now):
        for out in authority.handle(event, now):
            if isinstance(out, ToPart):
                said.extend(part.handle(out.news, now))

    def gives(learner, incarnation, now):
        c = Contribution(learner, incarnation, 0, 0, 2, 2, 20)
        said.extend(part.handle(events.FragmentArrived(RoundId(2, 0), c), now))

    def has(learner, incarnation, steps, now):
        counters = (FragmentCounters(0, steps, 10 * steps),)
        tell(events.StepReported(Report(learner, incarnation, steps, counters)), now)

    tell(PartConnected(0), 0.0)
    for learner in (0, 1):
        tell(events.LearnerJoined(learner, 1), 0.0)
    for learner in (0, 1):
        tell(events.LearnerReady(learner, 1, 0, (0,)), 0.0)
        has(learner, 1, 1, 1.0)
    if silent:
        tell(events.Timeout(), 9.0)
    now = 9.0 if silent else 2.0
    has(1, 1, 2, now)
    gives(1, 1, now)
    has(0, 1, -1, now + 1.0)  # which cannot be
    tell(events.LearnerJoined(0, 2, 1, (0,)), now + 2.0)
    assert not any(isinstance(one, actions.Merge) for one in said)
    has(0, 2, 2, now + 3.0)
    gives(0, 2, now + 3.0)
    assert [c.learner for m in said if isinstance(m, actions.Merge) for c in m.contributions] == [0, 1]


@pytest.mark.parametrize("authority_is_new", [False, True])
@pytest.mark.parametrize(("quorum", "last"), [(1, 15), (1, 16), (2, 15), (2, 16)])
def test_no_round_goes_without_learners_that_a_roll_call_is_yet_to_name(authority_is_new, quorum, last):
    """Before its step and in its window; else each flap of the connection would cost them an interval."""
    policy = SyncPolicy(
        num_learners=3, num_fragments=1, interval=8, overlap=4, quorum=quorum, rebase=True, max_grace=4.0
    )
    syncer = Halves(policy)
    syncer.enter(0, 1, 2)
    for step in range(1, 9):
        syncer.report(0, step, step)
    for learner in (0, 1, 2):
        syncer.offer(learner, 0, 8, 8, RoundId(8, 0))
    syncer.part(events.MergeFinished(RoundId(8, 0)), 8.1)
    for step in range(9, last + 1):
        syncer.report(1, step, step - 8)
    early, late = ([2], [0, 1]) if quorum == 1 else ([1, 2], [0])
    for learner in early:
        syncer.offer(learner, 1, last, last - 8, RoundId(16, 0))
    assert syncer.merged == [[0, 1, 2]]
    if authority_is_new:
        syncer.core = AuthorityCore(policy, 100, syncer.core.state(), 1)
    syncer.authority(PartConnected(0), last + 0.1)
    assert syncer.merged == [[0, 1, 2]]
    if authority_is_new:
        syncer.enter(0, 1, 2, incarnation=2, step=last, versions=(1,))
    syncer.report(1, last + 1, last - 7, 2 if authority_is_new else 1)
    for learner in late:
        syncer.offer(learner, 1, last + 1, last - 7, RoundId(16, 0), 2 if authority_is_new else 1)
    if len(syncer.merged) == 1:  # what is owed anew is waited for
        syncer.part(events.Timeout(), syncer.half.next_deadline())
    assert syncer.merged == [[0, 1, 2]] * 2


class Halves:
    """An authority and its one part, and the learners that each merge had."""

    def __init__(self, policy):
        self.core = AuthorityCore(policy, 100, SyncerState.initial(1), 1)
        self.half = Part(policy, 100, SyncerState.initial(1), [0], lineage=7)
        self.merged = []
        self.authority(PartConnected(0), 0.0)

    def authority(self, event, now):
        for one in self.core.handle(event, now):
            if isinstance(one, ToPart):
                self.part(one.news, now)

    def part(self, event, now):
        for one in self.half.handle(event, now):
            if isinstance(one, news.Word):
                self.authority(FromPart(0, one), now)
            elif isinstance(one, actions.Merge):
                self.merged.append([c.learner for c in one.contributions])

    def enter(self, *learners, incarnation=1, step=None, versions=None):
        now = 0.0 if step is None else step + 0.2
        for learner in learners:
            self.authority(events.LearnerJoined(learner, incarnation, step, versions), now)
            if step is None:
                self.authority(events.LearnerReady(learner, incarnation, 0, (0,)), now)

    def report(self, version, step, steps, incarnation=1):
        for learner in (0, 1, 2):
            counters = (FragmentCounters(version, steps, 10 * steps),)
            said = events.StepReported(Report(learner, incarnation, step, counters))
            self.authority(said, float(step))

    def offer(self, learner, version, step, steps, due, incarnation=1):
        lineage = 7 if version else 0
        given = Contribution(learner, incarnation, 0, version, step, steps, 10 * steps, lineage)
        self.part(events.FragmentArrived(due, given), step + 0.05)
