"""The states of a learner: every move that may be made, every one that may not, and who is counted."""

from ddiloco.protocol.membership import Member, Membership, MemberState
from ddiloco.protocol.messages import FragmentCounters, Report


def test_members_come_in_the_order_of_their_numbers_whoever_joined_first():
    members = Membership(range(1))
    for learner in (2, 0, 1):
        members.begin(members.admit(Member(learner, 1, heard_at=0.0)), 0, ())
    assert [m.learner for m in members.present()] == [m.learner for m in members.live()] == [0, 1, 2]


def test_only_live_members_count_and_only_the_gone_are_absent():
    members = Membership(range(1))
    for learner, state in enumerate(MemberState):
        member = members.admit(Member(learner, 1, heard_at=0.0))
        if state in (MemberState.LIVE, MemberState.SILENT):
            members.move(member, MemberState.LIVE)
        members.move(member, state)
    assert [m.state for m in members.live()] == [MemberState.LIVE]
    assert [m.state for m in members.present()] == [MemberState.JOINING, MemberState.LIVE, MemberState.SILENT]


def test_of_two_reports_of_one_step_the_one_with_older_versions_is_the_older():
    def report(*versions):
        return Report(0, 1, 5, tuple(FragmentCounters(version, 1, 10) for version in versions))

    member = Member(0, 1, heard_at=0.0)
    assert not member.knows_better(report(0, 0))
    member.take(report(1, 2), {0: 0, 1: 1})
    assert (member.step, member.reports, member.version(1)) == (5, 1, 2)
    assert member.knows_better(report(1, 1))
    assert not member.knows_better(report(1, 2))
    assert not member.knows_better(report(2, 2))
