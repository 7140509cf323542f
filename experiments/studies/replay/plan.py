"""What each process did to its arrays, in order: found by running its core over the events of its tape."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.parts import AuthorityCore, Part
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage import array_file
from ddiloco.storage.learner_state import MAGIC
from ddiloco.storage.tape.entries import Adopted, Committed, End, Gave, InnerOrigin
from ddiloco.storage.tape.file import TapeError
from experiments.studies.replay.reading import RunTapes, Tape
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
    ReplayPlan,
    ReplayWork,
    Return,
    Step,
    VersionId,
)


def make_plan(tapes: RunTapes, policy: SyncPolicy, total_steps: int | None) -> ReplayPlan:
    """Runs every core over its tape; raises TapeError if it cannot have had those events."""
    learners = [life(tape, policy, total_steps) for lives in tapes.learners.values() for tape in lives]
    offers = {w.id: w.contribution for actor in learners for w in actor.works if isinstance(w, OfferWork)}
    syncer = _Syncer(tapes, policy, total_steps, offers)
    return ReplayPlan(learners, syncer.actors(), _began(tapes.began))


def _began(folder: pathlib.Path | None) -> dict[InnerOrigin, pathlib.Path]:
    """By what tapes call them, the folders of the states that a run went on with."""
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
    h = tape.header
    core = LearnerCore(h.learner, h.process, policy, total_steps)
    works: list[ReplayWork] = []
    if h.resumed is not None:
        if h.resumed.origin is None:
            raise TapeError(f"{tape.path}: begins with a state that no tape names")
        works = [Return(BEFORE, h.resumed.origin)]
        _resume(core, tape)
    handled: list[Handled] = []
    welcome: actions.AdoptAll | None = None  # its inner state is in an entry still to come
    offers: dict[int, dict[int, OfferId]] = {}  # by fragment and steps, since the fragment's last update
    places: dict[OfferId, int] = {}  # of offers among the works
    for i, (now, content) in enumerate((e.now, e.content) for e in tape.entries):
        decided: Sequence[Any] = ()
        clock = core.clock
        match content:
            case Adopted(origin=origin, fresh=fresh):
                if welcome is None or (origin is None and not fresh):
                    raise TapeError(f"{tape.path}: entry {i}: an inner state of unknown origin")
                works.append(Adopt(i, welcome.versions, origin, welcome.position))
                welcome = None
                offers.clear()
            case Gave(number=number):
                works.append(Give(i, InnerOrigin(h.learner, h.process, number)))
            case End():
                pass
            case _:
                if welcome is not None:
                    raise TapeError(f"{tape.path}: entry {i}: a welcome without its inner state")
                decided = _handled(core, tape, i, now, content)
                if isinstance(content, events.StepStarted):
                    works.append(Step(i, clock, content.tokens, core.incarnation))
                for action in decided:
                    match action:
                        case actions.AdoptAll():
                            welcome = action
                        case actions.MakeOffer(contribution=c):
                            offer = OfferId.of(c)
                            offers.setdefault(c.fragment, {})[c.upto.steps] = offer
                            places[offer] = len(works)
                            works.append(OfferWork(i, offer, c))
                        case actions.SendOffer(contribution=c):  # now it is known what was skipped
                            known = offers.setdefault(c.fragment, {})
                            if c.upto.steps not in known:  # it was in the state with which it went on
                                known[c.upto.steps] = offer = OfferId.of(c)
                                places[offer] = len(works)
                                works.append(OfferWork(i, offer, c))
                            place = places[known[c.upto.steps]]
                            works[place] = dataclasses.replace(works[place], contribution=c)
                        case actions.ApplyUpdate():
                            p = action.fragment
                            merged = offers.pop(p, {}).get(action.merged)
                            how = action.mixing, merged, action.merged, action.rebase
                            update = Apply(i, p, action.version, *how)
                            works.append(update)
        handled.append(Handled(now, content, decided))
    return Actor(tape, works, handled)


def _resume(core: LearnerCore, tape: Tape) -> None:
    """Gives a learner's core the state with which it went on."""
    h = tape.header
    try:
        core.resume(h.resumed.work, h.resumed.began)
    except LocalProtocolError as error:
        raise TapeError(f"{tape.path}: {error}") from None


def _handled(core: LearnerCore | _SyncersCore, tape: Tape, i: int, now: float, event: Any) -> Sequence[Any]:
    try:
        return core.handle(event, now)
    except (LocalProtocolError, AssertionError, AttributeError, LookupError) as error:
        raise TapeError(f"{tape.path}: entry {i}: {event!r} cannot have come then: {error}") from None


class _Syncer:
    """All processes of the syncer; each begins with the durable state that those before it left."""

    def __init__(
        self,
        tapes: RunTapes,
        policy: SyncPolicy,
        total_steps: int | None,
        offers: Mapping[OfferId, Contribution],
    ) -> None:
        self._tapes, self._policy, self._total = tapes.syncers, policy, total_steps
        self._offers, self._began = offers, tapes.began

    def actors(self) -> list[Actor]:
        """One for each process."""
        first = self._tapes[0]
        if any(first.header.state.versions) and self._began is None:
            raise TapeError(f"{first.path}: does not begin with the run: the tape before it is missing")
        return [self._process(n, tape) for n, tape in enumerate(self._tapes)]

    def _process(self, n: int, tape: Tape) -> Actor:
        core = _core(tape, self._policy, self._total)
        begun: dict[int, MergeWork] = {}  # by fragment, merges that have not finished
        merges: list[MergeWork] = []
        numbers = itertools.count()
        handled: list[Handled] = []
        last: dict[int, int] = {}
        for i, (now, content) in enumerate((e.now, e.content) for e in tape.entries):
            decided: Sequence[Any] = ()
            match content:
                case Committed(fragment=p, version=version, sha256=sha256):
                    if not merges or merges[-1].makes != (p, version):
                        raise TapeError(f"{tape.path}: entry {i}: {VersionId(p, version)} of no merge")
                    merges[-1] = dataclasses.replace(merges[-1], sha256=sha256)
                case End(versions=versions):
                    last = dict(zip(tape.header.fragments, versions, strict=True))
                case _:
                    decided = _handled(core, tape, i, now, content)
                    if isinstance(content, events.MergeFinished):
                        merge = begun.pop(content.round.fragment)
                        given = {c.learner for _, c in merge.given}
                        empty = bool(given) and given <= set(content.left_out)
                        merges.append(dataclasses.replace(merge, entry=i, empty=empty))
                    for action in decided:
                        if isinstance(action, actions.Merge):
                            begun[action.round.fragment] = self._merge(tape, i, next(numbers), action)
            handled.append(Handled(now, content, decided))
        merges += self._unnoted(n, merges, begun, last)
        before = tuple(
            _id(t) for t in self._tapes[:n] if set(t.header.fragments) & set(tape.header.fragments)
        )
        in_order = sorted(merges, key=lambda merge: merge.number)
        works = [Begin(BEFORE, before), *in_order, Ended(len(tape.entries) - 1, _id(tape))]
        return Actor(tape, works, handled)

    def _unnoted(
        self, n: int, merges: list[MergeWork], begun: dict[int, MergeWork], last: dict[int, int]
    ) -> list[MergeWork]:
        """Merges that were committed, but that the process ended too early to note."""
        tape, found = self._tapes[n], []
        had = dict(enumerate(tape.header.state.versions))
        had.update(merge.makes for merge in merges if merge.makes is not None)
        for p in tape.header.fragments:
            then, digest = last.get(p), None
            following = next((t.header for t in self._tapes[n + 1 :] if p in t.header.fragments), None)
            if following is not None:
                then = following.state.versions[p]
                digest = bytes.fromhex(following.sha256[following.fragments.index(p)])
            if then is None or then == had[p]:
                continue
            merge = begun.get(p)
            if merge is None or merge.version != then:
                raise TapeError(f"{tape.path}: ends at version {had[p]} of fragment {p}, but {then} followed")
            found.append(dataclasses.replace(merge, entry=len(tape.entries) - 1, sha256=digest))
        return found

    def _merge(self, tape: Tape, entry: int, number: int, action: actions.Merge) -> MergeWork:
        given = tuple((self._offer(tape, c), c) for c in action.contributions)
        return MergeWork(entry, number, action.round, action.version, given)

    def _offer(self, tape: Tape, c: Contribution) -> OfferId:
        """The offer that a contribution was; its learner may have rejoined, or set its clock, since."""
        key = OfferId.of(c)
        made = self._offers.get(key)
        if made is None or dataclasses.replace(made, incarnation=c.incarnation, step=c.step) != c:
            raise TapeError(f"{tape.path}: {key} was merged, but is on no tape of that learner")
        return key


_SyncersCore = SyncerCore | AuthorityCore | Part


def _core(tape: Tape, policy: SyncPolicy, total_steps: int | None) -> _SyncersCore:
    """The core of a process of the syncer, as it began."""
    h = tape.header
    if h.role == "authority":
        return AuthorityCore(policy, total_steps, h.state, h.parts)
    if h.role == "part":
        return Part(policy, total_steps, h.state, h.fragments, h.lineage)
    return SyncerCore(policy, total_steps, h.state, h.lineage)


def _id(tape: Tape) -> ProcessId:
    return ProcessId(tape.header.role, tape.header.part, tape.header.process)
