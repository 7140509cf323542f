"""What happened, as lines to read: all actors' entries by time, each with its vector clock."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol import actions, events
from ddiloco.storage.tape.entries import Adopted, Committed, End, Gave, Signed
from experiments.cli.program import UsageError
from experiments.studies.replay import works as plans
from experiments.studies.replay.order import perform
from experiments.studies.replay.works import Actor, Key, ReplayPlan, ReplayWork, VersionId


@dataclasses.dataclass(frozen=True)
class VectorClock:
    """What a state follows from; a learner or fragment that is missing has no part in it.

    One state comes before another if the other holds all that it does, and more (`<=`, but not both ways).
    """

    # By learner (incarnation, global step), which only grows: a learner that is welcomed again, perhaps at an
    # earlier step, has a larger incarnation
    learners: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # By fragment, the version; 0, where all begin, is left out
    versions: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def joined(self, other: VectorClock) -> VectorClock:
        """The clock of a state that holds both: by entry, the later one."""
        return VectorClock(
            {m: max(self._at(m), other._at(m)) for m in {*self.learners, *other.learners}},
            {p: max(self.version(p), other.version(p)) for p in {*self.versions, *other.versions}},
        )

    def stepped(self, learner: int, incarnation: int, step: int) -> VectorClock:
        """The clock with the learner at this step."""
        return dataclasses.replace(self, learners={**self.learners, learner: (incarnation, step)})

    def merged(self, fragment: int, version: int) -> VectorClock:
        """The clock with this version of the fragment."""
        return dataclasses.replace(self, versions={**self.versions, fragment: version})

    def version(self, fragment: int) -> int:
        """The version of the fragment."""
        return self.versions.get(fragment, 0)

    def __le__(self, other: VectorClock) -> bool:
        """Whether the other holds all that this one does."""
        return all(at <= other._at(m) for m, at in self.learners.items()) and all(
            version <= other.version(p) for p, version in self.versions.items()
        )

    def _at(self, learner: int) -> tuple[int, int]:
        return self.learners.get(learner, (-1, -1))


class TimelineRow(NamedTuple):
    """One entry of a tape.

    Attributes:
      wall: unix seconds; in virtual time virtual seconds.
      learner: whose it is; None: the syncer's.
      shard: of the syncer; None: of its only process.
      text: what happened, and what followed.
      clock: whose work the actor's parameters hold then; None where a process begins or is cut off, and where
        a missing tape hides it.
      round_step: the global step of the round that it belongs to, where it belongs to one.
    """

    wall: float
    learner: int | None
    shard: int | None
    text: str
    clock: VectorClock | None = None
    round_step: int | None = None


class ReplayClocks:
    """The vector clock of each actor's parameters after each entry, by the way of the data."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._of: dict[Key, VectorClock] = {}
        for p, version in plan.begins.items():
            self._of[VersionId(p, version)] = VectorClock({}, {p: version} if version else {})
        self._at = {id(actor): self._begin(actor) for actor in plan.actors}
        self._after: dict[tuple[int, int], VectorClock] = {}
        perform(plan, self._do)

    def after(self, actor: Actor) -> Iterator[VectorClock | None]:
        """The clocks after each entry of an actor's tape; None once it is not known."""
        works = {w.entry for w in actor.works}
        clock: VectorClock | None = self._begin(actor)
        for entry in range(len(actor.handled)):
            if entry in works:
                found = self._after.get((id(actor), entry))
                # A merge may be noted after a later one.
                noted = found is not None and clock is not None and actor.tape.header.learner is None
                clock = found.joined(clock) if noted else found
            yield clock

    def _begin(self, actor: Actor) -> VectorClock:
        header = actor.tape.header
        clock, versions = VectorClock(), ()
        if header.resumed is not None:
            clock = VectorClock({header.learner: (header.process, header.resumed.work.clock)})
            versions = [fragment.version for fragment in header.resumed.work.fragments]
        elif header.state is not None:
            versions = header.state.versions
        for p, version in enumerate(versions):
            clock = clock.joined(self._of.get(VersionId(p, version), VectorClock()))
        return clock

    def _do(self, actor: Actor, work: ReplayWork) -> None:
        clock = self._at[id(actor)]
        header = actor.tape.header
        match work:
            case plans.Begin():
                clock = self._begin(actor)
            case plans.Adopt():
                clock = VectorClock()
                for key in work.needs:
                    clock = clock.joined(self._of.get(key, VectorClock()))
            case plans.Return(origin=origin) if origin is not None:
                clock = clock.joined(self._of.get(origin, VectorClock()))
            case plans.Step(clock=before, incarnation=incarnation):
                clock = clock.stepped(header.learner, incarnation, before + 1)
            case plans.OfferWork(id=key):
                self._of[key] = clock
            case plans.Apply(update=key):
                clock = clock.joined(self._of.get(key, VectorClock()))
            case plans.Give(origin=origin):
                self._of[origin] = clock
            case plans.MergeWork(empty=False):
                for key in work.needs:
                    clock = clock.joined(self._of[key])
                clock = clock.merged(work.round.fragment, work.version)
                self._of[work.makes] = clock
        self._at[id(actor)] = clock
        self._after[id(actor), work.entry] = clock


def timeline(plan: ReplayPlan) -> list[TimelineRow]:
    """All entries of all tapes, by time."""
    clocks = ReplayClocks(plan)
    lines = [line for actor in plan.actors for line in _lines(actor, clocks)]
    return sorted(lines, key=lambda line: line.wall)


def chosen(
    lines: Sequence[TimelineRow], learner: int | None, around: int | None, steps: int
) -> list[TimelineRow]:
    """The lines of one learner and of the syncer, from `steps` global steps before a round to as many after.

    None: of all learners; of all rounds.

    Raises:
      UsageError: there is no such learner, or no round near that step.
    """
    known = sorted({line.learner for line in lines if line.learner is not None})
    if learner not in (None, *known):
        raise UsageError(f"learner: is {learner}, but must be one of {', '.join(map(str, known))}")
    kept = [line for line in lines if learner is None or line.learner in (learner, None)]
    if around is None:
        return kept
    wanted = range(around - steps, around + steps + 1)
    near = [i for i, line in enumerate(kept) if line.round_step in wanted]
    if not near:
        raise UsageError(f"around: is {around}, but no round is within --steps={steps} of that global step")
    return kept[near[0] : near[-1] + 1]


def shown(line: TimelineRow, virtual: bool) -> str:
    """A line as it is printed: time, actor, what happened, vector clock."""
    if virtual:
        when = f"{line.wall:12.3f}"
    else:
        when = datetime.datetime.fromtimestamp(line.wall).strftime("%H:%M:%S.%f")[:-3]
    of_syncer = "syncer" if line.shard is None else f"shard {line.shard}"
    who = of_syncer if line.learner is None else f"learner {line.learner}"
    return f"{when}  {who:10}  {line.text:72}  {clock_text(line.clock)}".rstrip()


def clock_text(clock: VectorClock | None) -> str:
    """Learners with their steps, then fragments with their versions: `[0:12 1:11 | 0:2 1:1]`; None: empty."""
    if clock is None:
        return ""
    learners = " ".join(f"{m}:{step}" for m, (_, step) in sorted(clock.learners.items()))
    versions = " ".join(f"{p}:{version}" for p, version in sorted(clock.versions.items()))
    return f"[{learners or '-'} | {versions or '-'}]"


def _lines(actor: Actor, clocks: ReplayClocks) -> Iterator[TimelineRow]:
    tape, header = actor.tape, actor.tape.header
    of_several = header.learner is None and header.shards > 1
    now, whose = header.now, (header.learner, header.shard if of_several else None)
    named = "process" if header.learner is None else "process, incarnation"
    yield TimelineRow(tape.wall(now), *whose, f"{named} {header.process} begins")
    for (at, content, decided), clock in zip(actor.handled, clocks.after(actor), strict=True):
        now = now if at is None else at
        text = _happened(content) + _followed(decided)
        yield TimelineRow(tape.wall(now), *whose, text, clock, _round_step(content, decided))
    if not tape.ended:
        yield TimelineRow(tape.wall(now), *whose, "its tape ends here: killed, or still running")


def _happened(content: Any) -> str:
    match content:
        case events.Welcomed() as e:
            return f"welcomed at step {e.step} with versions {_listed(e.versions)}"
        case events.NotMember(incarnation=n):
            return f"learns that incarnation {n} is no member"
        case events.Rejected(reason=reason):
            return f"rejected: {reason}"
        case events.StepStarted(tokens=tokens):
            return f"step started, {tokens} tokens"
        case events.StepFinished():
            return "step finished"
        case events.TimingSet(interval=h, overlap=tau, quorum=k):
            return f"timing: H = {h}, tau = {tau}, K = {k or 'all'}"
        case events.ClockSet(step=step):
            return f"is asked to set its clock to step {step}"
        case events.OfferAsked(round=r, clock=clock):
            return f"is asked for fragment {r.fragment} from step {clock} on"
        case events.UpdateArrived() as e:
            return f"update: fragment {e.fragment} version {e.version}, merged at step {e.step}"
        case events.Heartbeat() | events.Timeout():
            return type(content).__name__.lower()
        case events.LearnerJoined() as e:
            request = "asks to join" if e.versions is None else f"returns at step {e.step}"
            return f"learner {e.learner} {request} as incarnation {e.incarnation}"
        case events.LearnerReady() as e:
            return f"learner {e.learner} is ready at step {e.step}"
        case events.LearnerLost() as e:
            return f"learner {e.learner} is lost: {e.reason}"
        case events.StepReported(report=r):
            return f"learner {r.learner} reports step {r.step}"
        case events.FragmentArrived(round=r, contribution=c):
            return f"fragment {r.fragment} of learner {c.learner} from step {c.step} ({c.steps} steps)"
        case events.OfferFailed(round=r) as e:
            return f"fragment {r.fragment} of learner {e.learner} does not come: {e.reason}"
        case events.MergeFinished(round=r) as e:
            without = f" without {_listed(e.left_out)}" if e.left_out else ""
            return f"round {r.step} of fragment {r.fragment} is merged{without}"
        case events.Disconnected(shard):
            return f"has lost the connection to shard {shard} of the syncer"
    return _noted(content)


def _noted(content: Any) -> str:
    match content:
        case Adopted(origin=origin, fresh=fresh):
            return "goes on with a fresh inner state" if fresh else f"goes on with {origin}"
        case Gave(number=number):
            return f"gives its inner state away, number {number}"
        case Committed() as e:
            return f"committed: fragment {e.fragment} version {e.version}, {e.sha256.hex()[:12]}"
        case Signed(fragment=p):
            return f"signs its statement on fragment {p}"
        case End():
            return "ends"
    return str(content)


def _followed(decided: Sequence[Any]) -> str:
    phrases = []
    for action in decided:
        match action:
            case actions.MakeOffer(contribution=c):
                phrases.append(f"copies fragment {c.fragment} at step {c.step}")
            case actions.SendOffer(contribution=c):
                phrases.append(f"offers fragment {c.fragment}")
            case actions.Merge(round=r) as a:
                phrases.append(
                    f"merges fragment {r.fragment} of {_listed([c.learner for c in a.contributions])}"
                )
            case actions.Send(receivers, events.UpdateArrived(p, version)):
                phrases.append(f"sends fragment {p} version {version} to {len(receivers)}")
            case actions.Send(((m, _),), events.Welcomed()):
                phrases.append(f"welcomes {m}")
            case actions.Send(receivers, events.OfferAsked(r)):
                phrases.append(f"asks {_listed([m for m, _ in receivers])} for fragment {r.fragment}")
            case actions.Send(receivers, events.TimingSet()):
                phrases.append(f"sends the timing to {len(receivers)}")
            case actions.Send(_, events.ClockSet(step)):
                phrases.append(f"sets the clocks of laggards to step {step}")
            case actions.Drop(reason=reason):
                phrases.append(f"drops it: {reason}")
            case actions.Record(name=name) if not isinstance(action, actions.Published):
                phrases.append(name.replace("_", " "))
            case actions.Finish():
                phrases.append("the run is over")
    return f"; {', '.join(phrases)}" if phrases else ""


def _round_step(content: Any, decided: Sequence[Any]) -> int | None:
    match content:
        case events.FragmentArrived(round=r) | events.OfferFailed(round=r) | events.MergeFinished(round=r):
            return r.step
        case events.OfferAsked(round=r):
            return r.step
        case events.UpdateArrived(step=step):
            return step
        case events.StepReported(report=r):
            return r.step
    for action in decided:
        match action:
            case actions.SendOffer(contribution=c) | actions.MakeOffer(contribution=c):
                return c.step
            case actions.SendToSyncer(events.StepReported(r)):
                return r.step
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} ... {numbers[-1]}"
