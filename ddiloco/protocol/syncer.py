"""The syncer's side of the protocol: membership, and rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ddiloco.protocol import actions, events
from ddiloco.protocol.authority import Authority
from ddiloco.protocol.membership import Membership
from ddiloco.protocol.messages import Contribution, Watermark
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.report_validator import ReportValidator
from ddiloco.protocol.round import Round
from ddiloco.protocol.rounds import Rounds
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState

Actions = list[actions.SyncerAction]


class SyncerCore:
    """Decides for the syncer; starts no thread, reads no clock, touches no array.

    It has two halves: the `Authority` over membership, and the `Rounds` of its fragments.

    With the `state` of a crashed syncer it continues from there: no round is merged twice, and no learner is
    a member until it rejoins.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        total_steps: int | None = None,
        state: SyncerState | None = None,
        lineage: int = 0,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """`state`: the durable state to continue from; None: a new run.

        `lineage`: a number unique to this start of the syncer, for the versions that it makes. `shard`:
        number of this shard, of `shards`; each is a syncer of its own fragments.

        Raises:
          LocalProtocolError: the state is of another number of fragments.
        """
        self.policy = policy
        self.total_steps = total_steps
        self.shard = shard
        state = state or SyncerState.initial(policy.num_fragments)
        state.check(policy.num_fragments)
        own = fragments_of(shard, shards, policy.num_fragments)
        self._members = Membership(own)
        validator = ReportValidator(policy, total_steps, state, self._members, own)
        self._rounds = Rounds(policy, total_steps, state, self._members, validator, lineage, shard)
        with_rounds = self._members, validator, self._rounds, shard, shards
        self._authority = Authority(policy, total_steps, state, *with_rounds)

    def handle(self, event: events.SyncerEvent, now: float) -> Actions:
        """Takes one event, returns the actions that follow, in order; `now` is in seconds and never falls.

        Raises:
          LocalProtocolError: a merge finished that was not under way.
        """
        out: Actions = []
        match event:
            case events.FragmentArrived() | events.OfferFailed() | events.MergeFinished():
                out += self._rounds.handle(event, now)
            case events.TimingSet():
                out += self._set_timing(event)
            case events.Timeout():
                pass
            case _:
                out += self._authority.handle(event, now)
        out += self._authority.mark_silent(now)
        out += self._rounds.advance(now)
        out += self._authority.conclude(now)
        for offer in self._rounds.no_longer_waiting():
            out += self.handle(offer, now)
        return out

    def _set_timing(self, event: events.TimingSet) -> Actions:
        """Follows another timing, unless its rounds are over."""
        if self._rounds.over:
            return []
        self.policy = event.applied_to(self.policy)
        self._authority.set_policy(self.policy)
        return self._rounds.set_timing(dataclasses.replace(event, shard=self.shard), self.policy)

    def next_deadline(self) -> float | None:
        """When to send a Timeout, in the seconds of `now`; None if only an event can change anything."""
        times = (self._authority.next_deadline(), self._rounds.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def state(self) -> SyncerState:
        """What must survive a crash, as of now; after a merge it is `state().after(round, lineage)`."""
        return self._rounds.merged.with_incarnations(self._members.incarnations())

    def incarnation(self, learner: int) -> int | None:
        """The newest incarnation of a learner; None: unknown."""
        m = self._members.newest(learner)
        return None if m is None else m.incarnation

    def lost_for_good(self, absent: Callable[[int], bool]) -> list[events.LearnerLost]:
        """Its first events after a restart: the loss of known learners that can no longer join."""
        known, why = self._members.incarnations(), "is no learner of the run any more"
        return [events.LearnerLost(*one, why) for one in known if absent(one[0])]

    def furthest(self, learner: int) -> Watermark:
        """The furthest work of a learner that is, or may still be, merged."""
        return self._rounds.furthest(learner)

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self._authority.finished

    @property
    def step(self) -> int:
        """The newest global step of which a round was merged."""
        return self._rounds.merged.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return self._rounds.merged.versions

    @property
    def merged_steps(self) -> tuple[int, ...]:
        """By fragment, the global step of the round that made its version."""
        return self._rounds.merged.merged_steps

    @property
    def clocks(self) -> dict[int, tuple[int, int]]:
        """Newest incarnation and step of each learner with a known step."""
        return self._members.steps()

    @property
    def live(self) -> tuple[int, ...]:
        """The learners that count towards a quorum."""
        return tuple(m.learner for m in self._members.live())

    def longest_step(self, learners: Iterable[int]) -> float:
        """Measured step time of the slowest of these learners, in seconds; 0.0: unknown."""
        known = (self._members.newest(learner) for learner in learners)
        return max((m.step_time.value or 0.0 for m in known if m is not None), default=0.0)

    @property
    def offers(self) -> set[Contribution]:
        """Offers whose arrays are kept."""
        return self._rounds.offers

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The open rounds, for inspection."""
        return self._rounds.open
