"""The language of the scenario files: a script of events for the protocol cores, and the actions that follow.

A file is, in this order: its story in lines that start with `#`; `policy name=value ...`, the settings that
differ from the defaults; `total_steps N` where the run has an end; then events, each at a time in seconds,
one a line, with the actions that follow below it, indented. A learner is written `0`, its second
incarnation `0#2`; a round is written step/fragment, as in `3/0`. `shards N` makes the syncer one of so many:
versions and steps are then of a shard's own fragments, an event of shard 1 is written `at T shard 1 ...`, one
of a learner's core ends with `shard=1`, and `shards=0,1` in a join or a report says where it is a member.

Events of the syncer (several learners may stand for one, as in `report 0,1 step=3`, in that order):

    at T join 0 [step=N versions=0,0]                         with both, a return with what it holds
    at T ready 0 [step=N] [versions=0,0]                      unless told, as its welcome said
    at T report 0 step=N [versions=1,0] [steps=2,3]           unless told, the versions of its last report
    at T odd-report 0 step=N ...                              wrong or late; the script itself forgets it
    at T arrived 3/0 from 0 [step=N] [version=N] [fragment=N] [steps=N] [tokens=N]  unless told, as reported
    at T failed 3/0 from 0 because the reason
    at T merged 3/0
    at T lost 0 because the reason
    at T timeout
    at T show                                                 who is live, and the next deadline
    at T restart [committed=3/0] [older]     crashes, and starts from its durable state, or that of the start

Every step has 10 tokens. Where a reported version rises, its steps are those since the report before.
Events of learner N's own core; the line that starts with `=` is its state afterwards, `!` an error:

    at T learner 0 welcome [step=N] [versions=0,0] [merged=0,0] [incarnation=N]   unless told, its own
    at T learner 0 not-member incarnation=N
    at T learner 0 rejected incarnation=N [newest=N] because the reason
    at T learner 0 start [tokens=N]
    at T learner 0 finish
    at T learner 0 heartbeat
    at T learner 0 disconnected
    at T learner 0 clock step=N
    at T learner 0 asked 3/0 [version=N] [clock=N]                unless told, version 0 and the round's step
    at T learner 0 update fragment=N version=N step=N [offer=N]   with its own offer, made after N steps
"""

from __future__ import annotations

import dataclasses

from ddiloco.protocol import actions, events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import (
    NOTHING_MERGED,
    Contribution,
    FragmentCounters,
    Report,
    RoundId,
    Watermark,
)
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.schedule import fragments_of
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore

TOKENS_PER_STEP = 10
NOTHING = "(nothing)"


@dataclasses.dataclass
class _Account:
    """What the script has made a learner say so far: its step, and each fragment's version and steps."""

    step: int
    versions: list[int]
    steps: list[int]


class Scenario:
    """Runs a script against a syncer core and, where it names them, learner cores."""

    def __init__(self) -> None:
        self.policy: dict[str, int | float | None] = {}
        self.total_steps: int | None = None
        self.shards, self._shard = 1, 0  # how many, and of which the present line is
        self._syncers: dict[int, SyncerCore] = {}
        self._learners: dict[int, LearnerCore] = {}
        self._welcomes: dict[tuple[int, ...], events.Welcomed] = {}  # by shard, learner and incarnation
        self._accounts: dict[tuple[int, ...], _Account] = {}

    @property
    def syncer(self) -> SyncerCore:
        if self._shard not in self._syncers:
            self._syncers[self._shard] = self._started(None)
        return self._syncers[self._shard]

    @property
    def _own(self) -> tuple[int, ...]:
        """The fragments of the present shard."""
        return fragments_of(self._shard, self.shards, SyncPolicy(**self.policy).num_fragments)

    def _started(self, state: SyncerState | None) -> SyncerCore:
        policy = SyncPolicy(**self.policy)
        return SyncerCore(policy, self.total_steps, state, shard=self._shard, shards=self.shards)

    def run(self, line: str) -> list[str]:
        """Does what an unindented line says; returns the lines that belong below it."""
        match line.split():
            case ["policy", *settings]:
                self.policy |= {name: _number(value) for name, value in _pairs(settings).items()}
                return []
            case ["total_steps", steps]:
                self.total_steps = int(steps)
                return []
            case ["shards", shards]:
                self.shards = int(shards)
                return []
            case ["at", time, "shard", shard, *words]:
                self._shard = int(shard)
                found = self.run(" ".join(["at", time, *words]))
                self._shard = 0
                return found
            case ["at", time, "learner", number, *words]:
                return self._learner_event(int(number), words, float(time))
            case ["at", time, "show"]:
                return self._answer(float(time))
            case ["at", _, "restart", "older"]:
                return self._restart({}, SyncerState.initial(self.syncer.policy.num_fragments))
            case ["at", _, "restart", *words]:
                return self._restart(_pairs(words), self.syncer.state())
            case ["at", time, verb, *words]:
                found: list[str] = []
                for event in self._syncer_events(verb, words):
                    found += self._syncer_event(event, float(time))
                return found or [NOTHING]
        raise ValueError(f"cannot read the line {line!r}")

    def _syncer_event(self, event: events.SyncerEvent, now: float) -> list[str]:
        try:
            out = self.syncer.handle(event, now)
        except LocalProtocolError as error:
            return [f"! {error}"]
        for action in out:
            if isinstance(action, actions.Send) and isinstance(action.event, events.Welcomed):
                [receiver] = action.receivers
                self._welcomes[self._shard, *receiver] = action.event
        return [_say(action) for action in out if not isinstance(action, actions.Release)]

    def _answer(self, now: float) -> list[str]:
        deadline = self.syncer.next_deadline()
        assert deadline is None or deadline > now, "a deadline that has come is acted on at once"
        live = ", ".join(map(str, self.syncer.live)) or "nobody"
        return [f"live: {live}; next deadline: {'none' if deadline is None else f'{deadline:g}'}"]

    def _restart(self, told: dict[str, str], state: SyncerState) -> list[str]:
        state = state.with_incarnations(self.syncer.state().incarnations)
        if "committed" in told:
            state = state.after(_round(told["committed"]))
        self._syncers[self._shard] = self._started(state)
        known = ", ".join(_name(*key) for key in state.incarnations) or "nobody"
        merged = f"versions {_row(state.versions)}, merged at {_row(state.merged_steps)}"
        return [f"starts from {merged}, knowing {known}"]

    def _syncer_events(self, verb: str, words: list[str]) -> list[events.SyncerEvent]:
        match verb, words:
            case "join", [who, *rest]:
                return [self._joined(key, _pairs(rest)) for key in _learners(who)]
            case "ready", [who, *rest]:
                return [self._ready(key, _pairs(rest)) for key in _learners(who)]
            case "report" | "odd-report", [who, *rest]:
                remember = verb == "report"
                return [self._report(key, _pairs(rest), remember) for key in _learners(who)]
            case "lost", [who, "because", *reason]:
                return [events.LearnerLost(*key, " ".join(reason)) for key in _learners(who)]
            case "arrived", [which, "from", who, *rest]:
                return [self._arrived(_round(which), key, _pairs(rest)) for key in _learners(who)]
            case "failed", [which, "from", who, "because", *reason]:
                return [events.OfferFailed(_round(which), *key, " ".join(reason)) for key in _learners(who)]
            case "merged", [which]:
                return [events.MergeFinished(_round(which))]
            case "timeout", []:
                return [events.Timeout()]
        raise ValueError(f"cannot read the event {verb} {' '.join(words)!r}")

    def _joined(self, key: tuple[int, int], told: dict[str, str]) -> events.LearnerJoined:
        shards = _shards(told)
        if "step" not in told:
            return events.LearnerJoined(*key, shards=shards)
        step, versions = int(told["step"]), _list(told["versions"])
        self._accounts[self._shard, *key] = _Account(step, versions, [0] * len(versions))
        return events.LearnerJoined(*key, step, tuple(versions), shards=shards)

    def _ready(self, key: tuple[int, int], told: dict[str, str]) -> events.LearnerReady:
        welcome = self._welcomes.get((self._shard, *key))
        step = int(told["step"]) if "step" in told else welcome.step
        versions = _list(told["versions"]) if "versions" in told else list(welcome.versions)
        self._accounts[self._shard, *key] = _Account(step, versions, [0] * len(versions))
        return events.LearnerReady(*key, step, tuple(versions))

    def _report(self, key: tuple[int, int], told: dict[str, str], remember: bool) -> events.StepReported:
        nothing = [0] * len(self._own)
        account = self._accounts.get((self._shard, *key), _Account(0, nothing, nothing))
        step = int(told["step"])
        versions = _list(told["versions"]) if "versions" in told else account.versions
        taken = step - account.step
        known = zip(versions, account.versions, account.steps, strict=False)
        steps = [taken if new > old else count + taken for new, old, count in known]
        if "steps" in told:
            steps = _list(told["steps"])
        counters = [
            FragmentCounters(version, count, count * TOKENS_PER_STEP)
            for version, count in zip(versions, steps, strict=False)
        ]
        if remember:
            self._accounts[self._shard, *key] = _Account(step, versions, steps)
        return events.StepReported(Report(*key, step, tuple(counters), shards=_shards(told)))

    def _arrived(self, which: RoundId, key: tuple[int, int], told: dict[str, str]) -> events.FragmentArrived:
        account = self._accounts[self._shard, *key]
        fragment = int(told.get("fragment", which.fragment))
        at = self._own.index(fragment) if fragment in self._own else 0
        step = int(told.get("step", account.step))
        steps = int(told.get("steps", account.steps[at] + step - account.step))
        contribution = Contribution(
            *key,
            fragment=fragment,
            version=int(told.get("version", account.versions[at])),
            step=step,
            steps=steps,
            tokens=int(told.get("tokens", steps * TOKENS_PER_STEP)),
            since=self.syncer.state().watermarks[which.fragment].get(key[0], NOTHING_MERGED),
            upto=Watermark(0, step),  # all of one life
        )
        return events.FragmentArrived(which, contribution)

    def _learner_event(self, number: int, words: list[str], now: float) -> list[str]:
        policy = SyncPolicy(**self.policy)
        core = self._learners.setdefault(
            number, LearnerCore(number, 1, policy, self.total_steps, self.shards)
        )
        told = _pairs([word for word in words[1:] if "=" in word])
        shard = self._shard = int(told.get("shard", 0))
        own, self._shard = self._own, 0
        zeros = ",".join(["0"] * len(own))
        match words[0]:
            case "welcome":
                versions, merged = (tuple(_list(told.get(name, zeros))) for name in ("versions", "merged"))
                incarnation = int(told.get("incarnation", core.incarnations[shard]))
                step = int(told.get("step", 0))
                event = events.Welcomed(incarnation, step, versions, merged, own, shard=shard)
            case "not-member":
                event = events.NotMember(int(told["incarnation"]), shard)
            case "rejected":
                newest = int(told.get("newest", 0))
                event = events.Rejected(int(told["incarnation"]), _reason(words), newest, shard)
            case "disconnected":
                event = events.Disconnected(shard)
            case "start":
                event = events.StepStarted(int(told.get("tokens", TOKENS_PER_STEP)))
            case "finish":
                event = events.StepFinished()
            case "clock":
                event = events.ClockSet(int(told["step"]), shard)
            case "asked":
                which = _round(words[1])
                clock = int(told.get("clock", which.step))
                event = events.OfferAsked(which, int(told.get("version", 0)), clock)
            case "update":
                mark = Watermark(core.work.life, int(told["offer"])) if "offer" in told else NOTHING_MERGED
                fields = (int(told[name]) for name in ("fragment", "version", "step"))
                event = events.UpdateArrived(*fields, mark)
            case "heartbeat":
                event = events.Heartbeat()
            case verb:
                raise ValueError(f"cannot read the learner's event {verb!r}")
        try:
            found = [self._say_of_learner(action) for action in core.handle(event, now)]
        except LocalProtocolError as error:
            found = [f"! {error}"]
        state = "".join([", blocked" if core.blocked else "", ", done" if core.done else ""])
        numbers = _row(core.incarnations)
        who = f", incarnation {numbers}" if max(core.incarnations) > 1 else ""
        of = f", member of {_row(core.shards) or 'none'}" if self.shards > 1 else ""
        return [*found, f"= clock {core.clock}{state}{who}{of}"]

    def _say_of_learner(self, action: actions.LearnerAction) -> str:
        to = (
            f"to shard {action.shard}: "
            if self.shards > 1 and isinstance(action, actions.SendToSyncer)
            else ""
        )
        return to + _say(action)


def rewritten(text: str) -> str:
    """The scenario with, below each event, the actions that the cores take now.

    Raises:
      ValueError: a line that is not of the language.
    """
    scenario = Scenario()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            continue
        out.append(line)
        if line and not line.startswith("#"):
            out += [f"    {said}" for said in scenario.run(line)]
    return "\n".join(out) + "\n"


def _say(action: actions.SyncerAction | actions.LearnerAction) -> str:
    match action:
        case actions.Send(receivers, event):
            who = ", ".join(_name(*receiver) for receiver in receivers)
            known = action.watermarks.get(event.fragment, {}) if hasattr(event, "fragment") else {}
            merged = ", ".join(f"{m} to step {known[m].steps}" for m in sorted(known))
            return _say_told(who, event) + (f", with work of {merged}" if merged else "")
        case actions.SendToSyncer(events.LearnerJoined(learner, incarnation, step, versions)):
            held = "" if step is None else f": step {step}, versions {_row(versions)}"
            return f"ask to join as {_name(learner, incarnation)}{held}"
        case actions.SendToSyncer(events.LearnerReady(step=step, versions=versions)):
            return f"ready: step {step}, versions {_row(versions)}"
        case actions.SendToSyncer(events.StepReported(report)):
            counters = "; ".join(f"version {c.version}, {_work(c)}" for c in report.counters)
            return f"report step {report.step}: {counters}"
        case actions.DrawFrom(position):
            return f"draw from {position or 'the start'}"
        case actions.EndProcess(reason):
            return f"leave: {reason}"
        case actions.Merge(which, version, contributions):
            given = "; ".join(f"{_name(c.learner, c.incarnation)} with {_work(c)}" for c in contributions)
            return f"merge {_which(which)} into version {version}: {given}"
        case actions.Drop(learner, reason, None):
            return f"drop from {learner}: {reason}"
        case actions.Drop(learner, reason, which):
            return f"drop {_which(which)} from {learner}: {reason}"
        case actions.Record(name, values):
            told = [f"{key} {_value(value)}" for key, value in values.items() if key != "contributions"]
            return f"record {name}: {', '.join(told)}"
        case actions.Finish():
            return "finish"
        case actions.AdoptAll(step, versions):
            return f"adopt all: step {step}, versions {_row(versions)}"
        case actions.MakeOffer(contribution):
            return f"copy {_offer(contribution)}"
        case actions.SendOffer(which, contribution):
            return f"offer for {_which(which)} {_offer(contribution)}"
        case actions.ApplyUpdate(fragment, version, mixing, merged, rebase):
            mixed = f", mixing {mixing:g}" if mixing else ""
            own = "" if merged is None else f", with its offer after {merged} steps in it"
            kept = ", and keep what came after" if rebase else ""
            return f"apply fragment {fragment} version {version}{mixed}{own}{kept}"
    raise ValueError(f"no words for {action}")


def _say_told(who: str, event: events.FromSyncer) -> str:
    match event:
        case events.Welcomed(_, step, versions, merged):
            return f"welcome {who}: step {step}, versions {_row(versions)}, merged at {_row(merged)}"
        case events.Rejected(_, reason):
            return f"reject {who}: {reason}"
        case events.NotMember():
            return f"tell {who} that it is no member"
        case events.ClockSet(0):
            return f"take back the clock of {who}"
        case events.ClockSet(step):
            return f"set the clock to {step} for {who}"
        case events.OfferAsked(which, version, clock):
            return f"ask {who} for {_which(which)}: version {version}, at clock {clock}"
        case events.UpdateArrived(fragment, version, step):
            return f"broadcast fragment {fragment} version {version}, merged at {step}, to {who}"
    raise ValueError(f"no words for {event}")


def _offer(c: Contribution) -> str:
    return f"fragment {c.fragment} at step {c.step}: version {c.version}, {_work(c)}"


def _work(of: Contribution | FragmentCounters) -> str:
    return f"{of.steps} {'step' if of.steps == 1 else 'steps'}, {of.tokens} tokens"


def _name(learner: int, incarnation: int) -> str:
    return f"{learner}" if incarnation == 1 else f"{learner}#{incarnation}"


def _which(which: RoundId) -> str:
    return f"{which.step}/{which.fragment}"


def _row(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _value(value: object) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _learners(text: str) -> list[tuple[int, int]]:
    parts = [part.partition("#") for part in text.split(",")]
    return [(int(learner), int(incarnation or 1)) for learner, _, incarnation in parts]


def _round(text: str) -> RoundId:
    step, _, fragment = text.partition("/")
    return RoundId(int(step), int(fragment))


def _reason(words: list[str]) -> str:
    return " ".join(words[words.index("because") + 1 :])


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _shards(told: dict[str, str]) -> tuple[int, ...]:
    return tuple(_list(told["shards"])) if "shards" in told else ()


def _list(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _number(text: str) -> int | float | None:
    if text == "none":
        return None
    return float(text) if "." in text else int(text)
