"""Diagnosis of a run: each rule names a problem, its cause and a remedy."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from ddiloco.dashboard.view import LearnerView, RunView, SyncerView
from ddiloco.protocol.policy import MAX_AGE
from ddiloco.telemetry.formatting import seconds, share, size
from ddiloco.telemetry.state import SETTLED, trained_in_vain
from ddiloco.telemetry.watches import MANY

SLOW = 1.5  # times the others' step
LONG_JOIN = 50  # steps of others
LONG_ABSENCE = 10.0  # seconds that a host may take to connect
WAITS = 0.2  # share of the step time spent waiting for data
SHOCK = 0.005  # share of the loss by which it may rise at an update
MIN_SHARE = 0.7  # share of the work that should be merged
MAX_LOST = 0.1  # share of a learner's work that may be lost
_HERE = ("stepping", "waiting", "hung", "finished")
_FAR = (
    "What it sends arrives, late: with a longer config.sync.interval fewer updates come in between, and "
    "with config.sync.rebase late work counts. experiments.plan says what it is worth."
)
_THIN = (
    "Send less{}, or less often (config.sync.interval), or over more connections (config.remote.connections)."
)
_WIDE = ("f32", "bf16", "int8")  # codecs with a narrower alternative


@dataclasses.dataclass(frozen=True)
class Advice:
    """A problem of a run or, without `trouble`, a possible improvement."""

    what: str
    why: str
    do: str
    learner: int | None = None  # None: it concerns the whole run
    trouble: bool = True
    rule: str = ""
    commands: Sequence[str] = ()  # that do it, for a terminal


Rule = Callable[[RunView], Iterator[Advice]]


def advice(view: RunView) -> list[Advice]:
    """The findings of all rules, problems first, otherwise in the order of the rules."""
    found = [dataclasses.replace(one, rule=rule.__name__) for rule in RULES for one in rule(view)]
    return sorted(found, key=lambda one: not one.trouble)


def not_finite(view: RunView) -> Iterator[Advice]:
    """A learner's loss is NaN or infinite."""
    for one in view.learners:
        if one.not_finite:
            left = f", and {one.left_out} of its offers were left out" if one.left_out else ""
            yield Advice(
                f"Learner {one.learner}: its loss is not a number.",
                f"Its newest steps gave NaN or infinity{left}. The others continue without it.",
                "Restart it, so that it loads the global model. If this repeats, check its data, "
                "its devices (config.train.verify_every) and the learning rate.",
                one.learner,
                commands=_control(view, f"drain {one.learner}", f"add {one.learner}"),
            )


def skips_steps(view: RunView) -> Iterator[Advice]:
    """Steps are skipped, as their gradients are not finite."""
    many = [one for one in view.learners if one.skipped_share > MANY and not one.not_finite]
    everyone = len(many) > 1 and len(many) == sum(bool(one.clock) for one in view.learners)
    for one in many[:1] if everyone else many:
        whose = "All learners skip" if everyone else f"Learner {one.learner} skips"
        yield Advice(
            f"{whose} steps: {share(one.skipped_share)} of the last ones.",
            "Loss or gradient was not finite: such a step changes nothing, and is no work.",
            "Lower config.inner.learning_rate, raise config.inner.warmup_steps, or lower "
            "config.inner.clip_norm. If it is one learner alone, look at its data and devices.",
            None if everyone else one.learner,
        )


def dead(view: RunView) -> Iterator[Advice]:
    """A learner is dead, or was when the run ended."""
    for one in view.learners:
        if one.state == "dead":
            died = f"learner {one.learner} died"
            texts = (event.text for event in view.events if event.text.startswith(died))
            yield Advice(
                f"Learner {one.learner} has been dead for {seconds(one.state_seconds)}.",
                next(texts, "Its process or its connection has ended. The others continue without it."),
                f"Restart it with the same number; learners/{one.learner}/traceback.txt may have the cause.",
                one.learner,
            )


def hung(view: RunView) -> Iterator[Advice]:
    """A learner that should step does not."""
    for one in view.learners:
        if one.state == "hung":
            yield Advice(
                f"Learner {one.learner} has not taken a step for {seconds(one.state_seconds)}.",
                f"A step usually takes it {seconds(one.step_seconds)}: it hangs, or its connection is lost.",
                "Look at its host and its network. If its process hangs, kill it: it will rejoin. If it "
                "cannot be reached, have the syncer drop it.",
                one.learner,
                commands=_control(view, f"evict {one.learner}"),
            )


def host_missing(view: RunView) -> Iterator[Advice]:
    """A learner of several hosts waits for one of them."""
    for one in view.learners:
        missing = [at for at in one.hosts if at.state == "gone" and at.state_seconds > LONG_ABSENCE]
        if missing and len(missing) < len(one.hosts) and one.state not in ("dead", "finished"):
            named = ", ".join(str(at.host) for at in missing)
            longest = seconds(max(at.state_seconds for at in missing))
            yield Advice(
                f"Learner {one.learner} waits for its host {named}.",
                f"{len(one.hosts) - len(missing)} of its {len(one.hosts)} hosts are connected to the syncer; "
                f"that one has not been for {longest}, and an update counts once all have it.",
                "Look at that host and its way to the syncer. If its process hangs, kill it: all of the "
                "learner's processes start again together.",
                one.learner,
            )


def thin_link(view: RunView) -> Iterator[Advice]:
    """One learner steps, but its offers come late or never: its link is thin, or far."""
    for one in view.learners:
        others, codec = [other for other in view.learners if other is not one], _codec(view, one)
        alike = [other for other in view.learners if other.clock and _codec(view, other) == codec]
        due = (_median(other.sent / other.clock for other in alike) or 0.0) * one.clock
        why, what = _not_through(one, others), "too thin"
        if not why and one.sent < due / 2 and _unmerged(view, one):
            why = (
                f"It steps, but has sent {size(one.sent)}, not {size(due)}; "
                f"{share(one.merged_share or 0.0)} of its work is merged, and {share(_usual_share(view))} of "
                "the others'."
            )
        elif not why:
            why = _overwritten(view, one) or (None if _unmerged(view, one) else _late(one, others))
            what = "far" if one.sent > 0.9 * due else "thin or far"
        if why and view.syncer.rounds and not one.quarantined and not one.not_finite:
            yield Advice(
                f"Learner {one.learner}: its link to the syncer is {what}.",
                why,
                _FAR
                if what == "far"
                else _THIN.format(
                    f" (config.outer.codec is {codec}; int4 is an eighth of f32)" if codec in _WIDE else ""
                ),
                one.learner,
            )


def _codec(view: RunView, one: LearnerView) -> str:
    """The codec of the learner's offers; those beyond a list send in its last."""
    each = _codecs(view)
    return each[min(one.learner, len(each) - 1)]


def _codecs(view: RunView) -> Sequence[str]:
    codec = view.setting("outer.codec", "f32")
    return [codec] if isinstance(codec, str) else codec


def _not_through(one: LearnerView, others: Sequence[LearnerView]) -> str | None:
    if one.clock or not one.received or max((other.clock for other in others), default=0) < LONG_JOIN:
        return None
    return f"It has received {size(one.received)} and has yet to begin; others have long been stepping."


def _overwritten(view: RunView, one: LearnerView) -> str | None:
    """Each time takes the work of more than MAX_AGE rounds of a fragment."""
    if one.left_out or one.overwritten * MAX_AGE <= MAX_LOST * view.syncer.rounds:
        return None
    times = "once" if one.overwritten == 1 else f"{one.overwritten} times"
    return f"An update has overwritten its work {times}: it was not merged within {MAX_AGE} versions."


def _late(one: LearnerView, others: Sequence[LearnerView]) -> str | None:
    usual = _median(other.staleness for other in others)
    if one.staleness is None or usual is None or one.staleness < 3 + 3 * usual:
        return None
    late = f"Its work is merged {one.staleness:.1f} steps after it was sent"
    return f"{late}; that of the others after {usual:.1f}."


def waits_for_data(view: RunView) -> Iterator[Advice]:
    """A learner spends its time waiting for batches."""
    for one in view.learners:
        if _waits(one):
            others = _median(other.data_wait_share for other in view.learners if other is not one)
            yield Advice(
                f"Learner {one.learner} waits for data: a slow disk, or too few threads.",
                f"It waits for a batch {share(one.data_wait_share)} of its time; the others {share(others)}.",
                "Raise config.data.threads and config.data.prefetch, tokenize ahead (experiments.tokenize), "
                "or give it a faster disk.",
                one.learner,
            )


def quarantined(view: RunView) -> Iterator[Advice]:
    """The guard has a learner in quarantine."""
    for one in view.learners:
        if one.quarantined and not one.not_finite:
            yield Advice(
                f"Learner {one.learner} is in quarantine: its offers are not merged.",
                f"{one.left_out} of them were unlike the others' in tokens, norm or direction.",
                "Look at its alarm below, its data and its devices; it is released when it is like the "
                "others again (config.outer.guard). If it is not, send it away.",
                one.learner,
                commands=_control(view, f"drain {one.learner}"),
            )


def hardly_merged(view: RunView) -> Iterator[Advice]:
    """A learner trains, less of its work is merged than of the others', and no other rule applies."""
    advised = {one.learner for rule in (thin_link, not_finite, quarantined) for one in rule(view)}
    for one in view.learners:
        if one.learner not in advised and _unmerged(view, one):
            yield Advice(
                f"Learner {one.learner} trains in vain: {share(one.merged_share or 0.0)} of it is merged.",
                f"Of the others' {share(_usual_share(view))} is; its offers are refused, or come too "
                "late over a slow link.",
                "Look at its link to the syncer and at what was dropped, below; raise config.sync.gamma and "
                "config.sync.max_grace, so that rounds wait longer for it.",
                one.learner,
            )


def syncer_at_its_limit(view: RunView) -> Iterator[Advice]:
    """Merges take so long that rounds are late."""
    s = view.syncer
    if _busy(view):
        disk = "" if s.disk_seconds is None else f", {seconds(s.disk_seconds)} of it for the disk"
        yield Advice(
            f"The syncer is at its limit: it merges {s.rounds_per_second or 0:.2g} rounds a second of "
            f"{s.due_per_second or 0:.2g} that are due.",
            f"A merge takes {seconds(s.sync_seconds)}{disk}, and merges take {share(s.busy)} of its "
            f"time; {s.skipped} rounds were left out.",
            f"Give it {_scarce(s)}, or have it merge less often (config.sync.interval).",
        )


def _scarce(s: SyncerView) -> str:
    """Remedies for slow merges, by where a merge spends its time."""
    if s.disk_seconds is None or s.merge_seconds is None:
        return "more cores or a faster disk"
    return "a faster disk" if s.disk_seconds > s.merge_seconds else "more cores"


def interval_too_small(view: RunView) -> Iterator[Advice]:
    """Fragments are due more often than the links can carry them."""
    s, interval = view.syncer, view.setting("sync.interval", 0)
    lost = s.skipped + s.abandoned
    due = s.rounds + lost
    if _busy(view) or due < SETTLED or max(one.clock for one in view.learners) < interval:
        return
    stale = _median(one.staleness for one in view.learners) or 0.0
    if lost > 0.1 * due or stale > 2 + 2 * view.setting("sync.overlap", 1):
        better = max(2 * interval, round(interval * due / max(0.1 * due, s.rounds)))
        nothing = f"{lost} of {due} rounds came to nothing"
        wide = any(codec in _WIDE for codec in _codecs(view))
        fewer = ", or a codec of fewer bits (config.outer.codec=int4)" if wide else ""
        yield Advice(
            f"H is too small for the bandwidth: config.sync.interval is {interval} steps.",
            nothing if lost > 0.1 * due else f"Offers are {stale:.0f} steps old when they are merged.",
            f"Try config.sync.interval={better}{fewer}, or plan it.",
            commands=["python -m experiments.plan --workdir=DIR"],
        )


def planned(view: RunView) -> Iterator[Advice]:
    """A plan has settings that fit better."""
    found = view.plan.get("flags")
    choices = view.plan.get("choices") or [{}]
    if not found or any(view.setting(path) != v for path, v in choices[0].get("settings", {}).items()):
        return
    settings = [flag.removeprefix("--config.") for flag in found]
    timing = all(setting.startswith("sync.") for setting in settings)
    yield Advice(
        f"Other settings fit this run better: {', '.join(settings)}.",
        f"{view.plan.get('advice')!s}.",
        "Set them while it runs." if timing else "Restart it with these flags.",
        trouble=False,
        commands=_control(view, f"set {' '.join(settings)} --reason=plan") if timing else (),
    )


def worth(view: RunView) -> Iterator[Advice]:
    """A plan says what a learner is worth."""
    for number, lines in (view.plan.get("learners") or {}).items():
        *played, verdict = lines
        played_as = f"{'; '.join(map(str.strip, played))}."
        what = f"Learner {number} is thin, far or slow; its worth was played."
        yield Advice(what, played_as, f"{verdict.capitalize()}.", int(number), trouble=False)


def slow(view: RunView) -> Iterator[Advice]:
    """A learner steps slower than the others, and not for want of data."""
    usual = _median(one.step_seconds for one in view.learners)
    for one in view.learners:
        if usual and one.step_seconds and one.step_seconds > SLOW * usual and not _waits(one):
            times, rows = one.step_seconds / usual, share(usual / one.step_seconds)
            yield Advice(
                f"Learner {one.learner} is slow: {times:.1f} times the others' time for a step.",
                f"It takes {seconds(one.step_seconds)}, the others {seconds(usual)}. It holds nobody up, and "
                "what it does counts; but unless its chips are of a slower kind, they could do more.",
                "Compare its host, or trace it (--profile). With config.train.batch_sizes it can have "
                f"{rows} of the others' rows a step.",
                one.learner,
                trouble=False,
            )


def restarts(view: RunView) -> Iterator[Advice]:
    """A learner dies again and again."""
    for one in view.learners:
        if one.starts > 3:
            yield Advice(
                f"Learner {one.learner} has been started {one.starts} times.",
                "Each time it loses its inner optimizer's state, or fetches it from a peer.",
                f"See learners/{one.learner}/traceback.txt, and look at its host; until it is mended, the "
                "learner may stay away.",
                one.learner,
                trouble=False,
                commands=_control(view, f"drain {one.learner}"),
            )


def grace_unused(view: RunView) -> Iterator[Advice]:
    """Learners miss rounds that had time to wait for them."""
    s, gamma = view.syncer, view.setting("sync.gamma", 0.0)
    step = min((one.step_seconds for one in view.learners if one.step_seconds), default=None)
    if step is None or s.mean_share is None or s.mean_share > 0.97 or not _settled(view) or _explained(view):
        return
    slack = view.setting("sync.overlap", 1) * step - (s.quorum_seconds or 0) - (s.sync_seconds or 0)
    if slack > 0.5 * step and (s.grace_seconds or 0.0) < 0.05 * slack:
        yield Advice(
            f"Grace is unused: rounds wait {seconds(s.grace_seconds)} of {seconds(slack)} of slack.",
            f"{share(1 - s.mean_share)} of the possible offers miss their merges, though waiting is free.",
            f"Raise config.sync.gamma ({gamma:g} now) to 0.8, and config.sync.max_grace if that bounds it.",
            trouble=False,
        )


def work_lost(view: RunView) -> Iterator[Advice]:
    """Much of the work of all learners is never merged, and no other rule applies."""
    merged = view.summary.get("merged_share")
    if merged is not None and merged < MIN_SHARE and _settled(view) and not _explained(view):
        yield Advice(
            f"Only {share(merged)} of what learners train is merged.",
            "What was done between an offer and its update is lost, unless learners rebase.",
            "Set config.sync.rebase=true, and look at staleness and grace below.",
            trouble=False,
        )


def merge_shock(view: RunView) -> Iterator[Advice]:
    """Learners' loss rises at updates, and is mostly not made up before the next ones."""
    s = view.summary
    shock, error, kept = (s.get(f"merge_shock{name}") for name in ("", "_error", "_kept"))
    if shock is None or error is None or kept is None or not _settled(view):
        return
    if shock > max(3 * error, SHOCK * (s.get("train_loss") or 0.0)) and kept > 0.5:
        yield Advice(
            f"Merges cost: at an update the learners' loss rises by {shock:.3f} nats a token on average.",
            f"{share(kept)} of the updates are not made up before the next one.",
            f"Lower config.sync.interval ({view.setting('sync.interval')} now), "
            "config.outer.learning_rate or config.outer.momentum.",
            trouble=False,
        )


def waiting(view: RunView) -> Iterator[Advice]:
    """Chips are lost to waiting, by policy."""
    lost = view.summary.get("lost") or {}
    waited = (lost.get("waiting_for_peers") or 0.0) + (lost.get("waiting_for_network") or 0.0)
    if waited > 0.05:
        yield Advice(
            f"Learners wait: {share(waited)} of the chips' time.",
            f"With algorithm {view.setting('algorithm')} they wait for the slowest, and for the network.",
            "The preset `decoupled` (a quorum below M, no bound on running ahead) never waits.",
            trouble=False,
        )


RULES: Sequence[Rule] = (
    not_finite,
    skips_steps,
    dead,
    hung,
    host_missing,
    thin_link,
    waits_for_data,
    quarantined,
    hardly_merged,
    syncer_at_its_limit,
    interval_too_small,
    planned,
    worth,
    slow,
    restarts,
    grace_unused,
    work_lost,
    merge_shock,
    waiting,
)

_REMEDIES = (
    (r"the loss is", "Restart that learner; if this repeats, check its data, devices and learning rate."),
    (
        r"skips steps",
        "Lower inner.learning_rate; if others do not skip theirs, look at its data and devices.",
    ),
    (
        r"held-out loss is",
        "Look at the held-out data; roll back to a snapshot from before (experiments.rollback).",
    ),
    (r"its link to the syncer is too slow", "It is thin or far: see the advice at the top."),
    (r"of its work is merged", "Its link is thin, or it is late: see the advice at the top."),
    (r"sync\.offer_timeout", "Raise config.sync.offer_timeout, or send fewer bits (config.outer.codec)."),
    (r"remote\.donation_timeout", "Raise config.remote.donation_timeout: the state is too long."),
    (r"snapshot\.timeout", "Raise config.snapshot.timeout: checkpoints take longer, or that learner hangs."),
    (r"join token|what it sent was refused", "A stranger calls, or a learner of another version."),
    (r"minutes on node", "Take that node out of service if others do well; else see the process's log."),
    (r"silent data corruption", "Take that device out of service, and restart the learner elsewhere."),
    (r"No space left|has grown to|records were given up", "Make room on the disk of the workdir."),
    (r"quarantine", "Look at its data and devices; it is released when it is like the others again."),
    (r" died: ", "See its traceback.txt; start it again with the same number."),
)


def remedy(alarm: str) -> str | None:
    """The remedy of an alarm; None: its text has one."""
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, alarm)), None)


def _control(view: RunView, *verbs: str) -> list[str]:
    """The operator's commands for this, while there is a syncer."""
    if view.status != "running" or view.setting("driver") != "remote":
        return []
    return [f"python -m experiments.control --syncer=HOST:PORT {verb}" for verb in verbs]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _settled(view: RunView) -> bool:
    return bool(view.fragments) and view.syncer.rounds >= SETTLED * len(view.fragments)


def _waits(one: LearnerView) -> bool:
    return (one.data_wait_share or 0.0) > WAITS


def _busy(view: RunView) -> bool:
    s = view.syncer
    behind = s.due_per_second and s.rounds_per_second and s.rounds_per_second < 0.9 * s.due_per_second
    return bool((s.busy or 0.0) > 0.8 and (s.skipped or behind))


def _explained(view: RunView) -> bool:
    """Whether another rule already explains the unmerged work."""
    rules = (hung, not_finite, quarantined, thin_link, hardly_merged, interval_too_small, syncer_at_its_limit)
    return any(one for rule in rules for one in rule(view))


def _usual_share(view: RunView) -> float | None:
    return _median(one.merged_share for one in view.learners if one.clock)


def _unmerged(view: RunView, one: LearnerView) -> bool:
    """Whether a present learner trains in vain, lately too.

    A learner that took its last steps alone, after all merges, was in as many merges as the others.
    """
    rounds = _median(other.in_recent for other in view.learners)
    if rounds is None or (one.in_recent or 0.0) >= rounds / 2 or not _settled(view):
        return False
    connected = (other for other in view.learners if other.state in _HERE and other.clock)
    shares = {other.learner: other.merged_share or 0.0 for other in connected}
    return one.learner in trained_in_vain(shares, {other.learner: other.clock for other in view.learners})
