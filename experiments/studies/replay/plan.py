"""What each actor did to its arrays, in order: found by running its core over the events of its tape."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ddiloco.disk.tape.entries import Adopted, Committed, End, Gave, InnerOrigin
from ddiloco.disk.tape.file import TapeError
from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from experiments.studies.replay.reading import RunTapes, Tape

BEFORE = -1
"""The entry number of work that is done before the first entry of a tape."""


class VersionId(NamedTuple):
    """A version of a fragment."""

    fragment: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of fragment {self.fragment}"


class OfferId(NamedTuple):
    """A fragment as a learner's process held it after a step, with this version in it.

    `since` is the incarnation that was last welcomed; a welcome may set the learner's steps back. After the
    same step a learner may offer twice, before and after an update.
    """

    learner: int
    process: int
    since: int
    fragment: int
    step: int
    version: int

    def __str__(self) -> str:
        return f"learner {self.learner}'s offer of fragment {self.fragment} at step {self.step}"


Key = VersionId | OfferId | InnerOrigin


@dataclasses.dataclass(frozen=True)
class Work:
    """One thing done to arrays; `entry` is the number of the tape's entry that caused it."""

    entry: int

    @property
    def needs(self) -> tuple[Key, ...]:
        """What must have been made before."""
        return ()

    @property
    def makes(self) -> Key | None:
        """What it makes, if anything."""
        return None


@dataclasses.dataclass(frozen=True)
class Adopt(Work):
    """A learner loads all fragments and an inner state; `inner` None: a fresh one."""

    versions: tuple[int, ...]
    inner: InnerOrigin | None

    @property
    def needs(self) -> tuple[Key, ...]:
        versions = tuple(VersionId(p, v) for p, v in enumerate(self.versions))
        return versions if self.inner is None else (*versions, self.inner)


@dataclasses.dataclass(frozen=True)
class Return(Work):
    """A learner loads its part of the snapshot from which the run resumed."""


@dataclasses.dataclass(frozen=True)
class Step(Work):
    """A learner takes a step; `clock` steps came before it, and `tokens` are in its batch."""

    clock: int
    tokens: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Offer(Work):
    """A learner copies a fragment for the syncer."""

    id: OfferId
    contribution: Contribution

    @property
    def makes(self) -> Key:
        return self.id


@dataclasses.dataclass(frozen=True)
class Apply(Work):
    """A learner applies an update, as the action says."""

    fragment: int
    version: int
    mixing: float
    merged: OfferId | None  # the learner's offer that is in the update
    rebase: bool

    @property
    def needs(self) -> tuple[Key, ...]:
        needs: tuple[Key, ...] = (VersionId(self.fragment, self.version),)
        return needs if self.merged is None else (*needs, self.merged)


@dataclasses.dataclass(frozen=True)
class Give(Work):
    """A learner gives a copy of its inner state."""

    origin: InnerOrigin

    @property
    def makes(self) -> Key:
        return self.origin


@dataclasses.dataclass(frozen=True)
class Merge(Work):
    """The syncer makes a version, if any of the offers is merged; `sha256` is None if the tape has none.

    Its process makes merges in the order of their `number`, and notes each as soon as that one is durable.
    """

    process: int
    number: int
    round: RoundId
    version: int
    given: tuple[tuple[OfferId, Contribution], ...]
    sha256: bytes | None = None
    empty: bool = False  # all offers were left out, and no version was made

    @property
    def needs(self) -> tuple[Key, ...]:
        return tuple(offer for offer, _ in self.given)

    @property
    def makes(self) -> Key | None:
        return None if self.empty else VersionId(self.round.fragment, self.version)


class Handled(NamedTuple):
    """An entry of a tape, with what the core decided on it; `decided` is empty for a note."""

    now: float | None
    thing: Any
    decided: Sequence[Any]


@dataclasses.dataclass
class Actor:
    """A process of a learner, or all processes of the syncer, one after another."""

    name: str
    tapes: list[Tape]
    works: list[Work]
    handled: list[list[Handled]]  # by tape


@dataclasses.dataclass
class Plan:
    """What every actor did."""

    learners: list[Actor]
    syncer: Actor

    @property
    def actors(self) -> list[Actor]:
        """All of them, the syncer last."""
        return [*self.learners, self.syncer]

    @property
    def given(self) -> set[Key]:
        """What exists from the start: the first versions, and inner states in a snapshot."""
        versions = self.syncer.tapes[0].header.state.versions
        needs = {key for actor in self.learners for work in actor.works for key in work.needs}
        inner = {key for key in needs if isinstance(key, InnerOrigin) and key.in_snapshot}
        return {VersionId(p, version) for p, version in enumerate(versions)} | inner


def make_plan(tapes: RunTapes, policy: SyncPolicy, total_steps: int | None) -> Plan:
    """Runs every core over its tape; raises TapeError if it cannot have had those events."""
    learners = [life(tape, policy, total_steps) for lives in tapes.learners.values() for tape in lives]
    syncer = _Syncer(tapes, policy, total_steps, _adoptions(learners))
    return Plan(learners, syncer.actor())


def without_needless(plan: Plan) -> Plan:
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
    h = tape.header
    core = LearnerCore(h.learner, h.process, policy, total_steps)
    works: list[Work] = []
    if h.resumed is not None:
        works = [Return(BEFORE)]
        _resume(core, tape)
    handled: list[Handled] = []
    welcome: actions.AdoptAll | None = None  # its inner state is in an entry still to come
    since = h.process
    offers: dict[int, dict[int, OfferId]] = {}  # by fragment and step, since the fragment's last update
    for i, (now, thing) in enumerate((e.now, e.thing) for e in tape.entries):
        decided: Sequence[Any] = ()
        clock = core.clock
        match thing:
            case Adopted(origin=origin, fresh=fresh):
                if welcome is None or (origin is None and not fresh):
                    raise TapeError(f"{tape.path}: entry {i}: an inner state of unknown origin")
                works.append(Adopt(i, welcome.versions, origin))
                welcome, since = None, core.incarnation
                offers.clear()
            case Gave(number=number):
                works.append(Give(i, InnerOrigin(h.learner, h.process, number)))
            case End():
                pass
            case _:
                if welcome is not None:
                    raise TapeError(f"{tape.path}: entry {i}: a welcome without its inner state")
                decided = _handled(core, tape, i, now, thing)
                if isinstance(thing, events.StepStarted):
                    works.append(Step(i, clock, thing.tokens, core.incarnation))
                for action in decided:
                    match action:
                        case actions.AdoptAll():
                            welcome = action
                        case actions.MakeOffer(contribution=c):
                            offer = OfferId(h.learner, h.process, since, c.fragment, c.step, c.version)
                            offers.setdefault(c.fragment, {})[c.step] = offer
                            works.append(Offer(i, offer, c))
                        case actions.ApplyUpdate():
                            p = action.fragment
                            merged = offers.pop(p, {}).get(action.merged)
                            update = Apply(i, p, action.version, action.mixing, merged, action.rebase)
                            works.append(update)
        handled.append(Handled(now, thing, decided))
    return Actor(f"learner {h.learner}", [tape], works, [handled])


def _resume(core: LearnerCore, tape: Tape) -> None:
    """Gives a learner's core the state that it had in the snapshot."""
    h = tape.header
    try:
        core.resume(h.resumed.clock, h.resumed.fragments)
    except LocalProtocolError as error:
        raise TapeError(f"{tape.path}: {error}") from None


def _handled(core: LearnerCore | SyncerCore, tape: Tape, i: int, now: float, event: Any) -> Sequence[Any]:
    try:
        return core.handle(event, now)
    except (LocalProtocolError, AttributeError, IndexError) as error:
        raise TapeError(f"{tape.path}: entry {i}: {event!r} cannot have come then: {error}") from None


def _adoptions(learners: Iterable[Actor]) -> dict[int, list[tuple[int, int, dict[OfferId, Contribution]]]]:
    """By learner, for each welcome: the incarnation, the process, and the offers made since."""
    found: dict[int, list[tuple[int, int, dict[OfferId, Contribution]]]] = {}
    for actor in learners:
        h = actor.tapes[0].header
        offers = {w.id: w.contribution for w in actor.works if isinstance(w, Offer)}
        for since in sorted({key.since for key in offers}):
            own = {key: c for key, c in offers.items() if key.since == since}
            found.setdefault(h.learner, []).append((since, h.process, own))
    for welcomes in found.values():
        welcomes.sort(key=lambda welcome: welcome[:2])
    return found


class _Syncer:
    """All processes of the syncer; each begins with the durable state that the one before left."""

    def __init__(
        self, tapes: RunTapes, policy: SyncPolicy, total_steps: int | None, adoptions: dict[int, list]
    ) -> None:
        self._tapes, self._policy, self._total = tapes.syncers, policy, total_steps
        self._adoptions = adoptions

    def actor(self) -> Actor:
        """One actor for all of them."""
        works: list[Work] = []
        handled: list[list[Handled]] = []
        first = self._tapes[0]
        if any(first.header.state.versions) and first.header.resumed_from is None:
            raise TapeError(f"{first.path}: does not begin with the run: the tape before it is missing")
        for n, tape in enumerate(self._tapes):
            following = self._tapes[n + 1] if n + 1 < len(self._tapes) else None
            made, own = self._process(tape, following)
            works += made
            handled.append(own)
        return Actor("the syncer", self._tapes, works, handled)

    def _process(self, tape: Tape, following: Tape | None) -> tuple[list[Merge], list[Handled]]:
        core = SyncerCore(self._policy, self._total, tape.header.state, tape.header.lineage)
        begun: dict[int, Merge] = {}  # by fragment, merges that have not finished
        works: list[Merge] = []
        numbers = itertools.count()
        handled: list[Handled] = []
        last: tuple[int, ...] | None = None
        for i, (now, thing) in enumerate((e.now, e.thing) for e in tape.entries):
            decided: Sequence[Any] = ()
            match thing:
                case Committed(fragment=p, version=version, sha256=sha256):
                    if not works or works[-1].makes != (p, version):
                        raise TapeError(f"{tape.path}: entry {i}: {VersionId(p, version)} of no merge")
                    works[-1] = dataclasses.replace(works[-1], sha256=sha256)
                case End(versions=versions):
                    last = versions
                case _:
                    decided = _handled(core, tape, i, now, thing)
                    if isinstance(thing, events.MergeFinished):
                        merge = begun.pop(thing.round.fragment)
                        empty = {c.learner for _, c in merge.given} <= set(thing.left_out)
                        works.append(dataclasses.replace(merge, entry=i, empty=empty))
                    for action in decided:
                        if isinstance(action, actions.Merge):
                            begun[action.round.fragment] = self._merge(tape, i, next(numbers), action)
            handled.append(Handled(now, thing, decided))
        works += self._unnoted(tape, core, begun, last, following)
        return sorted(works, key=lambda merge: merge.number), handled

    def _unnoted(
        self,
        tape: Tape,
        core: SyncerCore,
        begun: dict[int, Merge],
        last: tuple[int, ...] | None,
        following: Tape | None,
    ) -> list[Merge]:
        """Merges that were committed, but that the process ended too early to note."""
        sha256: tuple[str, ...] = ()
        if following is not None:
            last, sha256 = following.header.state.versions, following.header.sha256
        if last is None:
            return []
        found = []
        for p, (version, had) in enumerate(zip(last, core.versions, strict=True)):
            if version == had:
                continue
            merge = begun.get(p)
            if merge is None or merge.version != version:
                raise TapeError(f"{tape.path}: ends at version {had} of fragment {p}, but {version} followed")
            digest = bytes.fromhex(sha256[p]) if sha256 else None
            found.append(dataclasses.replace(merge, entry=len(tape.entries) - 1, sha256=digest))
        return found

    def _merge(self, tape: Tape, entry: int, number: int, action: actions.Merge) -> Merge:
        given = tuple((self._offer(tape, c), c) for c in action.contributions)
        return Merge(entry, tape.header.process, number, action.round, action.version, given)

    def _offer(self, tape: Tape, c: Contribution) -> OfferId:
        """The offer that a contribution was, found by the learner's incarnation."""
        welcomes = [w for w in self._adoptions.get(c.learner, []) if w[0] <= c.incarnation]
        if welcomes:
            since, process, offers = welcomes[-1]
            key = OfferId(c.learner, process, since, c.fragment, c.step, c.version)
            taken = offers.get(key)
            if taken is not None and dataclasses.replace(taken, incarnation=c.incarnation) == c:
                return key
        offer = OfferId(c.learner, 0, 0, c.fragment, c.step, c.version)
        raise TapeError(f"{tape.path}: {offer} was merged, but is on no tape of that learner")
