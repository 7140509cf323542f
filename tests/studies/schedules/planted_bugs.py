"""Mistakes to plant in the protocol's cores, one at a time, for the random schedules to find."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.attendance import Attendance
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.membership import State
from ddiloco.protocol.rounds import Phase, Round
from ddiloco.protocol.syncer import SyncerCore


def double_merge(patch: pytest.MonkeyPatch) -> None:
    """A fragment that comes late, or for the second time, goes into the next round, whatever its version."""

    def careless(core, event, now):
        c = event.contribution
        r = next((r for r in core._rounds if r.id.fragment == c.fragment), None)
        if r is None or r.phase is Phase.MERGING:
            return []
        r.owed.pop(c.learner, None)
        r.arrived[c.learner] = c
        return []

    patch.setattr(SyncerCore, "_fragment_arrived", careless)


def lost_counter_reset(patch: pytest.MonkeyPatch) -> None:
    """A learner that applies an update goes on counting from where it was."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        before = list(core._fragments)
        out = sound(core, event)
        if core.recovered and core._fragments != before:
            old, new = before[event.fragment], core._fragments[event.fragment]
            new.steps, new.tokens = old.steps, old.tokens
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

    def careless(core, policy, total_steps, state=None):
        kept = None if state is None else dataclasses.replace(state, incarnations=())
        sound(core, policy, total_steps, kept)

    patch.setattr(SyncerCore, "__init__", careless)


def lost_ready(patch: pytest.MonkeyPatch) -> None:
    """The first report of a joining learner does not make up for a `ready` that was lost."""
    sound = Attendance.reported

    def careless(attendance, report, merged, now):
        m = attendance.newest(report.learner)
        joining = m is not None and m.incarnation == report.incarnation and m.state is State.JOINING
        return [] if joining else sound(attendance, report, merged, now)

    patch.setattr(Attendance, "reported", careless)


def lost_join(patch: pytest.MonkeyPatch) -> None:
    """A learner asks to join once only."""
    sound = LearnerCore.handle

    def careless(core, event, now):
        asks = isinstance(event, events.Heartbeat) and not core.recovered
        return [] if asks else sound(core, event, now)

    patch.setattr(LearnerCore, "handle", careless)


def unasked(patch: pytest.MonkeyPatch) -> None:
    """An offer is taken of anybody, also of one that has gone and of one that was never asked."""
    patch.setattr(SyncerCore, "_welcomes", lambda core, r, c: r.phase is not Phase.MERGING)


def double_counting(patch: pytest.MonkeyPatch) -> None:
    """With rebase a learner goes on counting the steps that were in its offer."""
    sound = LearnerCore._update_arrived

    def careless(core, event):
        before = list(core._fragments)
        out = sound(core, event)
        if any(getattr(action, "rebase", False) for action in out):
            old, new = before[event.fragment], core._fragments[event.fragment]
            new.steps, new.tokens = old.steps, old.tokens
        return out

    patch.setattr(LearnerCore, "_update_arrived", careless)


def crowded_merges(patch: pytest.MonkeyPatch) -> None:
    """One more round is merged at once than the overlap allows."""
    sound = SyncerCore._merge

    def careless(core, r, now):
        kept, core.policy = core.policy, dataclasses.replace(core.policy, overlap=core.policy.overlap + 1)
        out = sound(core, r, now)
        core.policy = kept
        return out

    patch.setattr(SyncerCore, "_merge", careless)


def endless_window(patch: pytest.MonkeyPatch) -> None:
    """A round waits for every offer that is owed, however long."""
    patch.setattr(Round, "complete", lambda r, now: not r.owed)


def asked_once(patch: pytest.MonkeyPatch) -> None:
    """Whoever's offer failed is not asked for another in that round."""
    patch.setattr(Round, "has_failed", lambda r, m: m.learner in r.failed)


PLANTED = (
    double_merge,
    lost_counter_reset,
    quorum_off_by_one,
    departed_returns,
    lost_ready,
    lost_join,
    unasked,
    double_counting,
    crowded_merges,
    endless_window,
    asked_once,
)
