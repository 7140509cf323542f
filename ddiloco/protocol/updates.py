"""The merged versions of a syncer's fragments, and their delivery to learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddiloco.protocol import actions, events
from ddiloco.protocol.membership import Member
from ddiloco.protocol.messages import NOTHING_MERGED, Contribution, RoundId, Watermark
from ddiloco.protocol.policy import MAX_AGE, SyncPolicy
from ddiloco.protocol.state import SyncerState


class Updates:
    """Sends versions of its fragments: in welcomes, after merges, and again after a loss.

    Attributes:
      merged: the state of its fragments; that of others is meaningless.
      fragments: their numbers.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        state: SyncerState,
        fragments: Sequence[int],
        lineage: int,
        shard: int = 0,
    ) -> None:
        """`lineage`: of the versions made from now on."""
        self.merged = state
        self.fragments = tuple(fragments)
        self.lineage = lineage
        self._shard = shard
        self._lineages = {p: {state.versions[p]: state.lineages[p]} for p in self.fragments}
        """By fragment, of the versions on which work may count."""
        self._are_all = len(self.fragments) == policy.num_fragments
        self._resend_timeout = policy.resend_timeout

    def add(self, which: RoundId, given: Sequence[Contribution]) -> None:
        """Records a merge of these offers."""
        self.merged, p = self.merged.after(which, self.lineage, given), which.fragment
        version, known = self.merged.versions[p], self._lineages[p]
        self._lineages[p] = {v: lineage for v, lineage in known.items() if v >= version - MAX_AGE}
        self._lineages[p][version] = self.lineage

    def made(self, fragment: int, version: int, lineage: int) -> bool:
        """Whether the version is of the run's history, and one of the last, as far as this process knows."""
        return self._lineages[fragment].get(version) == lineage

    def watermark(self, fragment: int, learner: int) -> Watermark:
        """How far the learner's work is in the newest version."""
        return self.merged.watermarks[fragment].get(learner, NOTHING_MERGED)

    def welcome(self, learner: int, incarnation: int, data: Watermark) -> actions.Send:
        """Sends all fragments to a joining learner, whose data continue behind the work `data`."""
        merged, own = self.merged, self.fragments
        marks = tuple(self.watermark(p, learner).bare for p in own)
        welcome = events.Welcomed(
            incarnation,
            max(merged.merged_steps[p] for p in own),
            tuple(merged.versions[p] for p in own),
            tuple(merged.merged_steps[p] for p in own),
            () if self._are_all else own,
            tuple(merged.lineages[p] for p in own) if any(merged.lineages) else (),
            marks if any(mark.life for mark in marks) else (),
            data,
            self._shard,
        )
        return actions.Send(((learner, incarnation),), welcome, {p: merged.watermarks[p] for p in own})

    def bring_up_to_date(self, m: Member, held: Mapping[int, int], now: float) -> list[actions.Send]:
        """Sends all versions newer than those that a learner holds."""
        behind = [p for p in self.fragments if held[p] < self.merged.versions[p]]
        return [sent for p in behind for sent in self.send(p, [m], now)]

    def send(self, fragment: int, receivers: Sequence[Member], now: float) -> list[actions.Send]:
        """Sends a fragment's newest version, to each learner with its own watermark."""
        if not receivers:
            return []
        merged = self.merged
        version, step = merged.versions[fragment], merged.merged_steps[fragment]
        for m in receivers:
            m.sent[fragment] = (version, now)
        pairs = tuple((m.learner, m.incarnation) for m in receivers)
        update = events.UpdateArrived(fragment, version, step, lineage=merged.lineages[fragment])
        return [actions.Send(pairs, update, {fragment: merged.watermarks[fragment]})]

    def resend(self, m: Member, now: float) -> list[actions.Send]:
        """Sends updates again that the learner's reports do not confirm within the resend timeout."""
        out: list[actions.Send] = []
        for fragment, (version, sent_at) in list(m.sent.items()):
            if (held := m.version(fragment)) is not None and held >= version:
                del m.sent[fragment]
            elif now >= sent_at + self._resend_timeout:
                out += self.send(fragment, [m], now)
        return out
