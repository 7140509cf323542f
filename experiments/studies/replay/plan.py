"""What each process did to its arrays, in order: its actor, driven by its tape, calls them by their names.

What an actor is given beside an event is only named here. Each call that it makes on its arrays is a work,
which is done once all that it needs has been made.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.outer.global_model import NextVersion
from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage import array_file
from ddiloco.storage.learner_state import MAGIC
from ddiloco.storage.tape.entries import Adopted, Committed, End, Entry, Gave, InnerOrigin, Signed
from ddiloco.storage.tape.file import TapeError
from ddiloco.workers.exchange import InnerState, fragments_with
from ddiloco.workers.learner_actor import LearnerActor, LearnerArrays, LearnerDriver
from ddiloco.workers.syncer_actor import FragmentVersion, SyncerActor, SyncerDriver
from experiments.studies.replay.reading import RunTapes, Tape, begins
from experiments.studies.replay.works import (
    BEFORE,
    Actor,
    Adopt,
    Apply,
    Begin,
    Ended,
    Give,
    Handled,
    MergeWork,
    OfferId,
    OfferWork,
    ProcessId,
    Recorded,
    ReplayPlan,
    ReplayWork,
    Return,
    SetPosition,
    Step,
    VersionId,
)


def make_plan(tapes: RunTapes, policy: SyncPolicy, total_steps: int | None) -> ReplayPlan:
    """Drives every actor by its tape; raises TapeError if its core cannot have had those events."""
    learners = [life(tape, policy, total_steps) for lives in tapes.learners.values() for tape in lives]
    sent = {offer: c for actor in learners for offer, c in actor.sent.items()}
    numbers = range(len(tapes.syncers))
    if any(begins(tapes.syncers).values()) and tapes.began is None:
        path = tapes.syncers[0].path
        raise TapeError(f"{path}: does not begin with the run: the tape before it is missing")
    syncers = [SyncerProcess(tapes.syncers, n, policy, total_steps, sent).actor() for n in numbers]
    return ReplayPlan(learners, syncers, _began(tapes.began))


def _began(folder: pathlib.Path | None) -> dict[InnerOrigin, pathlib.Path]:
    """The folders of the states that a run resumed from, by their names on tapes."""
    found = {}
    for path in () if folder is None else folder.glob("learners/*/state.0.*"):
        try:
            origin = array_file.load_header(path, MAGIC)["origin"]
        except (OSError, ValueError, LookupError) as error:
            raise TapeError(f"{path}: cannot be used: {error}") from None
        if origin is not None:
            found[InnerOrigin(*origin)] = path.parent
    return found


def without_needless(plan: ReplayPlan) -> ReplayPlan:
    """The plan without offers, inner states and final steps that the global model does not depend on."""
    wanted = {key for actor in plan.actors for work in actor.works for key in work.needs}
    learners = []
    for actor in plan.learners:
        works = [w for w in actor.works if w.makes is None or w.makes in wanted]
        last = max((i for i, w in enumerate(works) if w.makes is not None), default=-1)
        learners.append(dataclasses.replace(actor, works=works[: last + 1]))
    return dataclasses.replace(plan, learners=learners)


def life(tape: Tape, policy: SyncPolicy, total_steps: int | None) -> Actor:
    """What one process of a learner did. Raises TapeError if its core cannot have had these events."""
    return _LearnerProcess(tape, policy, total_steps).actor()


class _TapeEnds(Exception):
    """What the actor did next is not on the tape."""


class _Process:
    """Gives an actor what is on the tape of its process, and keeps what follows.

    Attributes:
      entry: the number of the tape's entry that the actor is at.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape, self.entry = tape, BEFORE
        self._handled: list[Handled] = []

    def _follow(self) -> None:
        """Takes all entries; raises TapeError at one that cannot have come then."""
        try:
            while True:
                entry = self._next()
                try:
                    self._take(entry.content, entry.now)
                except (LocalProtocolError, AssertionError, AttributeError, LookupError, ValueError) as error:
                    raise self._wrong(f"{entry.content!r} cannot have come then: {error}") from None
        except _TapeEnds:
            pass

    def _next(self) -> Entry:
        if self.entry + 1 == len(self.tape.entries):
            raise _TapeEnds
        self.entry += 1
        return self.tape.entries[self.entry]

    def _take(self, content: Any, now: float | None) -> None:
        raise NotImplementedError

    def _wrong(self, problem: str) -> TapeError:
        return TapeError(f"{self.tape.path}: entry {self.entry}: {problem}")

    # As the driver of the actor.

    def handled(self, event: Any, decided: Sequence[Any], now: float | None) -> None:
        self._handled.append(Handled(now, event, decided))


class _LearnerProcess(_Process, LearnerDriver):
    """Drives the actor of a learner; what it sends is on the syncer's tape."""

    def __init__(self, tape: Tape, policy: SyncPolicy, total_steps: int | None) -> None:
        super().__init__(tape)
        header = tape.header
        core = LearnerCore(header.learner, header.process, policy, total_steps, header.shards)
        self._arrays = _NamedArrays(self, core)
        self._actor = LearnerActor(core, self._arrays, self)
        self._sent: dict[OfferId, Contribution] = {}

    def actor(self) -> Actor:
        """What the process did."""
        resumed = self.tape.header.resumed
        if resumed is None:
            self._actor.join()
        else:
            if resumed.origin is None:
                raise TapeError(f"{self.tape.path}: begins with a state that no tape names")
            self._arrays.go_on(resumed.origin)
            try:
                self._actor.perform(self._actor.resume(resumed.work, resumed.began))
            except LocalProtocolError as error:
                raise TapeError(f"{self.tape.path}: {error}") from None
        self._follow()
        return Actor(self.tape, self._arrays.works, self._handled, sent=self._sent)

    def _take(self, content: Any, now: float | None) -> None:
        header = self.tape.header
        match content:
            case Gave(number=number):
                self._arrays.give(InnerOrigin(header.learner, header.process, number))
                self.handled(content, (), now)
            case Adopted():
                raise self._wrong("an inner state without a welcome")
            case End():
                self.handled(content, (), now)
            case _:
                if isinstance(content, events.StepStarted):
                    self._arrays.tokens = content.tokens
                    self._actor.step()
                self._actor.handle(content, now, [VersionId(p, v) for p, v in versions_with(content)])

    # As the driver of its actor.

    def send_offer(self, offer: events.FragmentArrived, arrays: OfferId) -> None:
        self._sent[arrays] = offer.contribution

    def inner_state(self, versions: tuple[int, ...]) -> InnerState | None:
        content = self._next().content
        if not isinstance(content, Adopted):
            raise self._wrong("a welcome without its inner state")
        if content.origin is None and not content.fresh:
            raise self._wrong("an inner state of unknown origin")
        self.handled(content, (), None)
        return None if content.origin is None else InnerState(0, versions, content.origin)


class _NamedArrays(LearnerArrays):
    """The arrays of a learner's process, by name: what is done to them are `works`."""

    def __init__(self, process: _LearnerProcess, core: LearnerCore) -> None:
        self.works: list[ReplayWork] = []
        self.tokens = 0  # of the step that starts
        self._process, self._core = process, core
        # By fragment and steps, since an update had some of the work
        self._offers: dict[int, dict[int, OfferId]] = {}

    def go_on(self, origin: InnerOrigin) -> None:
        """Loads a state of before."""
        self.works.append(Return(BEFORE, origin))

    def give(self, origin: InnerOrigin) -> None:
        """Gives a copy of the inner state, or of all, this name."""
        self.works.append(Give(self._process.entry, origin))

    def adopt(self, fragments: Sequence[VersionId], inner: InnerOrigin | None = None) -> None:
        self._offers.clear()
        self.works.append(Adopt(self._process.entry, tuple(fragments), inner))

    def step(self, clock: int) -> tuple[int, Mapping[str, Any]]:
        self.works.append(Step(self._process.entry, clock, self.tokens, self._core.incarnation))
        return self.tokens, {}

    def offer(self, fragment: int, steps: int) -> OfferId:
        work = self._core.work
        since = work.fragments[fragment].watermark.bare
        offer = OfferId(self._core.learner, work.life, fragment, steps, since)
        self._offers.setdefault(fragment, {})[steps] = offer
        self.works.append(OfferWork(self._process.entry, offer))
        return offer

    def offered(self, fragment: int, steps: int) -> OfferId:
        known = self._offers.get(fragment, {}).get(steps)
        return self.offer(fragment, steps) if known is None else known  # it was in the state of before

    def draw_from(self, position: Any) -> None:
        self.works.append(SetPosition(self._process.entry, position))

    def apply(
        self,
        fragment: int,
        mixing: float,
        payload: VersionId,
        merged: int | None = None,
        rebase: bool = False,
    ) -> None:
        offers = self._offers.pop(fragment, {})
        offer = offers.get(merged)
        if rebase and merged is None:
            self._offers[fragment] = offers
        self.works.append(Apply(self._process.entry, payload, mixing, offer, merged, rebase))


def versions_with(event: Any) -> Sequence[tuple[int, int]]:
    """The fragments that travel with an event to a learner, with the version of each."""
    match event:
        case events.Welcomed(versions=versions):
            return list(zip(fragments_with(event), versions, strict=True))
        case events.UpdateArrived(fragment=p, version=version):
            return [(p, version)]
    return []


class SyncerProcess(_Process, SyncerDriver):
    """Drives the actor of a process of the syncer, which begins with what those before it left."""

    def __init__(
        self,
        tapes: Sequence[Tape],
        number: int,
        policy: SyncPolicy,
        total_steps: int | None,
        sent: Mapping[OfferId, Contribution] | None,
    ) -> None:
        """`number`: which of the tapes is the process's. `sent`: what learners sent; None: not known."""
        super().__init__(tapes[number])
        self._before, self._after, self._sent = tapes[:number], tapes[number + 1 :], sent
        header = self.tape.header
        versions = {p: header.state.versions[p] for p in header.fragments}
        named = {p: FragmentVersion(version, VersionId(p, version)) for p, version in versions.items()}
        of_shard = header.lineage, header.shard, header.shards
        self._actor = SyncerActor(SyncerCore(policy, total_steps, header.state, *of_shard), self, named)
        self._had = versions  # by fragment, the newest that is noted
        self._last: dict[int, int] = {}  # the newest as the process ended by itself
        self._begun: dict[int, MergeWork] = {}  # by fragment, merges that have not finished
        self._merges: list[MergeWork] = []
        self._numbers = itertools.count()
        self._records: list[Recorded] = []

    def actor(self) -> Actor:
        """What the process did."""
        self._follow()
        merges = sorted([*self._merges, *self.unnoted()], key=lambda merge: merge.number)
        own = set(self.tape.header.fragments)
        before = tuple(_id(tape) for tape in self._before if own & set(tape.header.fragments))
        works = [Begin(BEFORE, before), *merges, Ended(len(self.tape.entries) - 1, _id(self.tape))]
        return Actor(self.tape, works, self._handled, self._records)

    @property
    def core(self) -> SyncerCore:
        """The process's core, as the followed entries leave it."""
        core: SyncerCore = self._actor.core
        return core

    def _take(self, content: Any, now: float | None) -> None:
        match content:
            case Committed(fragment=p, version=version, sha256=sha256):
                if not self._merges or self._merges[-1].makes != (p, version):
                    raise self._wrong(f"{VersionId(p, version)} of no merge")
                self._merges[-1] = dataclasses.replace(self._merges[-1], sha256=sha256)
                self.handled(content, (), now)
            case End(versions=versions):
                self._last = dict(zip(self.tape.header.fragments, versions, strict=True))
                self.handled(content, (), now)
            case Signed():
                self.handled(content, (), now)
            case events.MergeFinished():
                self._finish(content, now)
            case events.FragmentArrived(contribution=c):
                self._actor.take_offer(content, OfferId.of(c), now)
            case _:
                self._actor.handle(content, now=now)

    def _finish(self, finished: events.MergeFinished, now: float) -> None:
        merge = self._begun.pop(finished.round.fragment)
        given = {c.learner for c, _ in merge.given}
        empty = bool(given) and given <= set(finished.left_out)
        merge = dataclasses.replace(merge, entry=self.entry, empty=empty)
        self._merges.append(merge)
        made = VersionId(merge.round.fragment, merge.version - empty)
        if not empty:
            self._had[made.fragment] = made.version
        following = NextVersion(made, {}, finished.left_out, empty=empty)
        self._actor.perform(self._actor.merged(finished, made.version, following, {}, now))

    def unnoted(self) -> list[MergeWork]:
        """Merges that were committed, but that the process ended too early to note."""
        found = []
        for p, had in self._had.items():
            then, digest = self._last.get(p), None
            following = next((t.header for t in self._after if p in t.header.fragments), None)
            if following is not None:
                then = following.state.versions[p]
                digest = bytes.fromhex(following.sha256[following.fragments.index(p)])
            if then is None or then == had:
                continue
            merge = self._begun.get(p)
            if merge is None or merge.version != then:
                problem = f"ends at version {had} of fragment {p}, but {then} followed"
                raise TapeError(f"{self.tape.path}: {problem}")
            found.append(dataclasses.replace(merge, entry=len(self.tape.entries) - 1, sha256=digest))
        return found

    # As the driver of its actor.

    def refuse(self, event: events.SyncerEvent, error: Exception) -> actions.Drop:
        raise error

    def merge(self, merge: actions.Merge, given: list[tuple[Contribution, OfferId]]) -> None:
        for c, offer in given:
            if self._sent is None:
                continue
            sent = self._sent.get(offer)
            # It may be sent again once its learner has rejoined, set its clock or applied another's work.
            anew = {"incarnation": c.incarnation, "step": c.step, "version": c.version, "lineage": c.lineage}
            if sent is None or dataclasses.replace(sent, **anew) != c:
                raise TapeError(f"{self.tape.path}: {offer} was merged, but is on no tape of that learner")
        of_round = merge.round, merge.version, tuple(given)
        begun = MergeWork(self.entry, next(self._numbers), *of_round, interval=merge.interval)
        self._begun[merge.round.fragment] = begun

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        self._records.append(Recorded(self.tape.entries[self.entry].now, name, values))


def _id(tape: Tape) -> ProcessId:
    return ProcessId(tape.header.shard, tape.header.process)
