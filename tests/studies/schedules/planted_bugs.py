"""Mistakes to plant in the protocol's cores, one at a time, for the random schedules to find."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.protocol import asking, events, learner
from ddiloco.protocol.asking import OfferRequests
from ddiloco.protocol.authority import Authority
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.membership import MemberState
from ddiloco.protocol.round import Phase, Round
from ddiloco.protocol.rounds import Rounds
from ddiloco.protocol.syncer import SyncerCore


def double_merge(patch: pytest.MonkeyPatch) -> None:
    """A fragment that comes late, or for the second time, goes into the next round, whatever its version."""

    def careless(rounds, event, now):
        c = event.contribution
        r = rounds._open.get(c.fragment)
        if r is None or r.phase is Phase.MERGING:
            return []
        r.owed.pop(c.learner, None)
        r.arrived[c.learner], r.known[c.learner] = c, c.steps
        return []

    patch.setattr(Rounds, "_fragment_arrived", careless)


def lost_counter_reset(patch: pytest.MonkeyPatch) -> None:
    """A learner that applies an update goes on counting from where it was."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        before = list(core._fragments)
        out = sound(core, event)
        if core.recovered and core._fragments != before:
            old, new = before[event.fragment], core._fragments[event.fragment]
            new.base = old.base
        return out

    patch.setattr(LearnerCore, "_update_arrived", careless)


def quorum_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The syncer is content with K - 1 learners, where K is more than 1."""
    sound = SyncerCore.__init__

    def careless(core, policy, *rest):
        fewer = max(1, policy.quorum - 1) if policy.quorum is not None else None
        sound(core, dataclasses.replace(policy, quorum=fewer), *rest)

    patch.setattr(SyncerCore, "__init__", careless)


def departed_returns(patch: pytest.MonkeyPatch) -> None:
    """After a crash the syncer has forgotten who had departed."""
    sound = SyncerCore.__init__

    def careless(core, policy, total_steps, state=None, lineage=0, *more):
        kept = None if state is None else dataclasses.replace(state, incarnations=())
        sound(core, policy, total_steps, kept, lineage, *more)

    patch.setattr(SyncerCore, "__init__", careless)


def lost_ready(patch: pytest.MonkeyPatch) -> None:
    """The first report of a joining learner does not make up for a `ready` that was lost."""
    sound = Authority._reported

    def careless(authority, report, now):
        m = authority.members.newest(report.learner)
        joining = m is not None and m.incarnation == report.incarnation and m.state is MemberState.JOINING
        return [] if joining else sound(authority, report, now)

    patch.setattr(Authority, "_reported", careless)


def lost_join(patch: pytest.MonkeyPatch) -> None:
    """A learner asks to join once only."""
    sound = LearnerCore.handle

    def careless(core, event, now):
        asks = isinstance(event, events.Heartbeat) and not core.recovered
        return [] if asks else sound(core, event, now)

    patch.setattr(LearnerCore, "handle", careless)


def late_offer(patch: pytest.MonkeyPatch) -> None:
    """An offer that comes while its round is being merged is taken for one that is in the merge."""
    patch.setattr(Rounds, "_wants", lambda rounds, r, m, c: c.learner not in r.arrived)


def double_counting(patch: pytest.MonkeyPatch) -> None:
    """With rebase a learner goes on counting the steps that were in its offer."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        before = list(core._fragments)
        out = sound(core, event)
        if any(getattr(action, "rebase", False) for action in out):
            old, new = before[event.fragment], core._fragments[event.fragment]
            new.base = old.base
        return out

    patch.setattr(LearnerCore, "_update_arrived", careless)


def crowded_merges(patch: pytest.MonkeyPatch) -> None:
    """One more round is merged at once than the overlap allows."""
    sound = Rounds._merge

    def careless(rounds, r, now):
        kept, more = rounds.policy, rounds.policy.overlap + 1
        rounds.policy = dataclasses.replace(kept, overlap=more)
        out = sound(rounds, r, now)
        rounds.policy = kept
        return out

    patch.setattr(Rounds, "_merge", careless)


def lost_history(patch: pytest.MonkeyPatch) -> None:
    """A version is known by its number alone: after a rollback others bore the same."""
    sound = SyncerCore.__init__

    def careless(core, policy, total_steps=None, state=None, lineage=0, *more):
        kept = None if state is None else dataclasses.replace(state, lineages=())
        sound(core, policy, total_steps, kept, 0, *more)

    patch.setattr(SyncerCore, "__init__", careless)


def lost_watermarks(patch: pytest.MonkeyPatch) -> None:
    """After a crash the syncer has forgotten how much of each learner's work is in its versions."""
    sound = SyncerCore.__init__

    def careless(core, policy, total_steps=None, state=None, lineage=0, *more):
        kept = None if state is None else dataclasses.replace(state, watermarks=())
        sound(core, policy, total_steps, kept, lineage, *more)

    patch.setattr(SyncerCore, "__init__", careless)


def drawn_again(patch: pytest.MonkeyPatch) -> None:
    """A new process draws its data behind what is merged, but not behind an offer that waits to be."""
    patch.setattr(Rounds, "furthest", lambda rounds, learner: rounds.merged.furthest(learner))


def counted_again(patch: pytest.MonkeyPatch) -> None:
    """A learner that goes on from a checkpoint takes what it does not know to be merged for its own."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        before = list(core._fragments)
        out = sound(core, event)
        stranger = event.watermark.life not in (0, core._life)
        if stranger and core.recovered and core._fragments != before:
            core._fragments[event.fragment].base = before[event.fragment].base
        return out

    patch.setattr(LearnerCore, "_update_arrived", careless)


def pushed_out(patch: pytest.MonkeyPatch) -> None:
    """Whoever bears a larger incarnation takes a learner's place, though that still speaks."""
    patch.setattr(Authority, "_speaks_for_itself", lambda authority, m, event, now: False)


def hasty_end(patch: pytest.MonkeyPatch) -> None:
    """A learner ends as soon as one shard asks for it, though another needs its work."""
    sound = LearnerCore._end_with_others

    def careless(core):
        asked = [session for session in core._sessions if session.ends_at]
        kept, core._sessions = core._sessions, asked or core._sessions
        try:
            return sound(core)
        finally:
            core._sessions = kept

    patch.setattr(LearnerCore, "_end_with_others", careless)


def deaf_to_a_welcome(patch: pytest.MonkeyPatch) -> None:
    """A learner that has begun waits for the welcomes of all shards once one welcomes it afresh."""
    patch.setattr(LearnerCore, "_adopt", lambda core, session: [])


def never_gives_way(patch: pytest.MonkeyPatch) -> None:
    """A process that one shard alone has let in keeps its place there as any other."""
    patch.setattr(Authority, "_is_at_some", lambda authority, m: False)


def empty_version(patch: pytest.MonkeyPatch) -> None:
    """A merge whose offers are all left out is taken for one that has made a version."""

    def careless(rounds, r):
        r.committed = True
        return [rounds._committed(r)]

    patch.setattr(Rounds, "_start_over", careless)


def asked_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Learners that wait are asked for offers again that were all left out."""
    patch.setattr(Rounds, "_repeat", Rounds._start_over)


def never_given_up(patch: pytest.MonkeyPatch) -> None:
    """A last round waits for work that was in a merge of which nothing came."""
    sound = Round.start_over

    def careless(r, live):
        sound(r, live)
        r.refused = dict.fromkeys(r.refused, 0)

    patch.setattr(Round, "start_over", careless)


def quorum_of_absent(patch: pytest.MonkeyPatch) -> None:
    """An offer counts in the quorum wherever its own learner is."""

    def careless(r, m):
        if r.has_given(m.learner):
            r.at_step.add(m.learner)

    patch.setattr(Round, "advance", careless)


def newest_offer(patch: pytest.MonkeyPatch) -> None:
    """A learner takes the newest of its offers for the one in an update: what came between is in no merge."""
    sound = LearnerCore._merged_offer

    def careless(core, old, mark):
        return None if sound(core, old, mark) is None else max(old.offered)

    patch.setattr(LearnerCore, "_merged_offer", careless)


def overwritten_work(patch: pytest.MonkeyPatch) -> None:
    """An update without a learner's work overwrites what of it is older than a version."""
    patch.setattr(learner, "MAX_AGE", 0)


def stale_offer(patch: pytest.MonkeyPatch) -> None:
    """An offer is merged however long ago it was made."""
    patch.setattr(Round, "has_aged", lambda r, m, steps: False)


def running_clock(patch: pytest.MonkeyPatch) -> None:
    """Every update sets a clock that is behind it."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        out = sound(core, event)
        if core.recovered:
            core.clock = max(core.clock, event.step)
        return out

    patch.setattr(LearnerCore, "_update_arrived", careless)


def deaf_to_misses(patch: pytest.MonkeyPatch) -> None:
    """Learners that miss their rounds are asked no earlier the next time."""
    patch.setattr(asking, "MISSED", 0.0)
    patch.setattr(OfferRequests, "merging", lambda self, r, members, now: None)


def hasty_merge(patch: pytest.MonkeyPatch) -> None:
    """A merge waits for the paper's window alone, whomever it expects."""
    patch.setattr(Round, "closes", lambda self, awaits_learners: self.window_closes)


def no_last_round(patch: pytest.MonkeyPatch) -> None:
    """The work since a fragment's last regular round is never merged."""
    sound = SyncerCore.__init__

    def careless(core, *args, **kwargs):
        sound(core, *args, **kwargs)
        core._rounds._schedule = dataclasses.replace(core._rounds._schedule, last=None)

    patch.setattr(SyncerCore, "__init__", careless)


QUICKLY = (
    no_last_round,
    quorum_of_absent,
    newest_offer,
    overwritten_work,
    stale_offer,
    running_clock,
    lost_counter_reset,
    quorum_off_by_one,
    departed_returns,
    double_counting,
    crowded_merges,
    lost_history,
    lost_watermarks,
    pushed_out,
    hasty_end,
    hasty_merge,
)
"""Those that the first schedules find within a second."""

SLOWLY = (
    double_merge,
    late_offer,
    lost_ready,
    lost_join,
    deaf_to_a_welcome,
    never_gives_way,
    empty_version,
    drawn_again,
    counted_again,
    asked_for_ever,
    never_given_up,
)

UNFAIR = (deaf_to_misses,)
"""Those that break no rule but that everybody's work must count; for fair schedules to find."""
