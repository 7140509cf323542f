"""The sections of a run's page below its verdict: learners, curves, lost time, rounds, alarms, settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.observe.words import amount, clock, seconds, share, size
from ddiloco.page.advice import Advice, remedy
from ddiloco.page.drawings import Line, axis, chart, lane, legend
from ddiloco.page.elements import Html, el, table
from ddiloco.page.timeline import Span
from ddiloco.page.view import EventView, LearnerView, RunView

FEW = 8  # learners that have a colour each
MOST_HOSTS = 8  # of a learner that have a lane each
_CAUSES = {
    "waiting_for_peers": "waiting for peers",
    "waiting_for_network": "waiting for the network",
    "detecting": "standing still, cause unknown",
    "reconfiguring": "joining, restoring, compiling",
    "replaying": "doing lost work again",
    "standby": "spare",
    "failed": "dead",
}


_COLUMNS: Mapping[str, Callable[[LearnerView], str]] = {
    "clock": lambda one: f"{one.clock}",
    "tokens/s": lambda one: amount(one.tokens_per_second),
    "step": lambda one: seconds(one.step_seconds),
    "data wait": lambda one: share(one.data_wait_share),
    "MFU": lambda one: share(one.mfu),
    "merged": lambda one: share(one.merged_share),
    "staleness": lambda one: "-" if one.staleness is None else f"{one.staleness:.1f} steps",
    "in rounds": lambda one: share(one.in_recent),
    "sent": lambda one: size(one.sent),
    "received": lambda one: size(one.received),
}
_IF_KNOWN = ("data wait", "MFU")  # columns that no run without measurements has


def learners(view: RunView, found: Sequence[Advice], key: str) -> Html:
    """Each learner: its state, its life as a lane, and its figures; below it, its hosts if it has several."""
    by_learner = {one.learner: one for one in reversed(found) if one.learner is not None}
    columns = [
        name
        for name, said in _COLUMNS.items()
        if name not in _IF_KNOWN or any(said(one) != "-" for one in view.learners)
    ]
    rows = [
        [_learner(view, one, by_learner.get(one.learner), key, columns), _hosts(view, one, len(columns))]
        for one in view.learners
    ]
    names = [el("th", name, scope="col") for name in ("learner", "now", "over time", *columns)]
    times = el("tr", el("td"), el("td"), el("td", axis(view.now), class_="wide"), class_="times")
    whole = el(
        "table",
        el("caption", "Learners", class_="spoken"),
        el("thead", el("tr", names)),
        el("tbody", rows),
        el("tfoot", times, aria_hidden="true"),
        class_="learners",
    )
    shown = legend(hosts=any(one.hosts for one in view.learners))
    return el("section", el("h2", "Learners"), whole, shown, id=f"{key}-learners", tabindex="-1")


def _learner(view: RunView, one: LearnerView, said: Advice | None, key: str, columns: Sequence[str]) -> Html:
    mark = "" if said is None else "✖ " if said.trouble else "▲ "
    label = f"learner {one.learner}: {_path_in_words(one.lane)}"
    why = None if said is None else el("p", said.what, class_="why")
    now = f"{mark}{one.state} {seconds(one.state_seconds) if one.state_seconds else ''}"
    kind = "" if said is None else "trouble" if said.trouble else "better"
    return el(
        "tr",
        el("th", f"{one.learner}", why, scope="row"),
        el("td", now, data_label="now"),
        el("td", lane(one.lane, view.now, label, one.merged, view.slot_seconds), class_="wide"),
        [el("td", _COLUMNS[name](one), data_label=name) for name in columns],
        id=f"{key}-learner-{one.learner}",
        class_=f"{kind} {one.state}".strip(),
    )


def _hosts(view: RunView, one: LearnerView, columns: int) -> list[Html]:
    """A row for each of a learner's several hosts; of many, for those that are gone or came last."""
    known = sorted(one.hosts, key=lambda at: (at.state != "gone", at.state_seconds))
    shown = sorted(known[:MOST_HOSTS], key=lambda at: at.host)
    rows = [
        el(
            "tr",
            el("th", el("span", f"learner {one.learner}, ", class_="spoken"), f"host {at.host}", scope="row"),
            el("td", f"{at.state} {seconds(at.state_seconds) if at.state_seconds else ''}", data_label="now"),
            el("td", lane(at.lane, view.now, f"host {at.host}: {_path_in_words(at.lane)}"), class_="wide"),
            el("td", colspan=columns),
            class_=f"host {at.state}",
        )
        for at in shown
    ]
    if more := known[MOST_HOSTS:]:
        told = f"{sum(at.state == 'connected' for at in more)} of them are connected"
        row = [el("th", f"{len(more)} more", scope="row"), el("td", told, colspan=columns + 2)]
        rows.append(el("tr", row, class_="host"))
    return rows


def _path_in_words(spans: Sequence[Span]) -> str:
    total: dict[str, float] = {}
    for state, start, end in spans:
        total[state] = total.get(state, 0.0) + end - start
    return ", ".join(f"{state} {seconds(spent)}" for state, spent in total.items() if spent > 0)


def curves(view: RunView, found: Sequence[Advice]) -> Html:
    """Losses, tokens a second, who was merged and how long rounds took, over time."""
    middles = [(place + 0.5) * view.slot_seconds for place in range(len(view.tokens_per_second))]
    troubled = {one.learner for one in found}
    losses = []
    for place, one in enumerate(view.learners):
        shown = len(view.learners) <= FEW or one.learner in troubled
        losses.append(Line(f"learner {one.learner}", middles, one.loss, place if shown else None))
    moments, scores = pairs(view.summary.get("eval_history") or [], "seconds")
    shown_from = view.started - (view.summary.get("started") or view.started)
    held_out = Line("global model, held-out", [moment - shown_from for moment in moments], scores, -1)
    rate = Line("tokens/s", middles, view.tokens_per_second, 0)
    spent = [
        Line("until the quorum", middles, view.quorum_seconds, 0),
        Line("grace", middles, view.grace_seconds, 1),
        Line("merge and write", middles, view.sync_seconds, 2),
    ]
    charts = [
        chart("Loss", "nats/token", [*losses, held_out], view.now),
        chart("Tokens a second", "all learners", [rate], view.now, zero=True),
    ]
    if view.syncer.rounds:
        who = [Line("in the merge", middles, view.quorum, 0), Line("there", middles, view.live, 1)]
        charts += [
            chart("Learners in a merge", "", who, view.now, zero=True),
            chart("Time of a round", "seconds", spent, view.now, zero=True),
        ]
    return el("section", el("h2", "Over time"), el("div", charts, class_="charts"))


def pairs(scores: Sequence[Mapping[str, Any]], over: str) -> tuple[list[float], list[float | None]]:
    """Steps or tokens, and losses, of the scores that there are."""
    known = [score for score in scores if score.get("loss") is not None]
    return [score[over] for score in known], [score["loss"] for score in known]


def lost(view: RunView) -> Html:
    """Where the chips' time went."""
    s = view.summary
    lost = {cause: part for cause, part in (s.get("lost") or {}).items() if part}
    largest = sorted(lost.items(), key=lambda item: -item[1])
    spent = {"stepping": s.get("goodput"), **{_CAUSES.get(cause, cause): part for cause, part in largest}}
    rows = [(name, share(part), _bar(part)) for name, part in spent.items()]
    told = f"Goodput {share(s.get('goodput'))}, uptime {share(s.get('uptime'))}."
    shown = table("Where the chips' time went", ("state", "share", ""), rows)
    return el("section", el("h2", "Where the time went"), el("p", told), shown)


def _bar(value: float | None) -> Html:
    drawn = el("rect", width=round(100 * (value or 0.0), 1), height=10, class_="bar")
    return el(
        "svg", drawn, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bars", aria_hidden="true"
    )


def syncer(view: RunView) -> Html:
    """What the syncer does, beside what it should or could do at most."""
    s = view.syncer
    interval = None if not s.due_per_second else 1 / s.due_per_second
    each = f"{seconds(interval)} from round to round"
    rows = [
        ("merges a second", _figure(s.rounds_per_second), f"{_figure(s.due_per_second)} are due"),
        ("merging and writing", share(s.busy), "100% of its time"),
        ("a round, until it is written", seconds(s.sync_seconds), each),
        ("the merge alone", seconds(s.merge_seconds), each) if s.merge_seconds is not None else None,
        ("the disk", seconds(s.disk_seconds), each) if s.disk_seconds is not None else None,
        ("messages that wait", s.inbox, "no bound; it is at its limit if they grow")
        if s.inbox is not None
        else None,
        ("merges that wait", s.merging, "one is made at a time") if s.merging is not None else None,
        ("bytes in", f"{size(s.in_per_second)}/s", "its network; not measured"),
        ("bytes out", f"{size(s.out_per_second)}/s", "its network; not measured"),
        (
            "learners in a merge",
            _figure(s.mean_quorum),
            f"{len(view.learners)}; {share(s.mean_share)} of those there",
        ),
        ("rounds left out", s.skipped, f"0, of {s.rounds}; {s.abandoned} more had no quorum"),
    ]
    found = [row for row in rows if row is not None]
    dropped = ", ".join(f"{reason}: {count}" for reason, count in s.drops.items())
    names = ("", "so far or lately", "at most, or wanted")
    return el(
        "section",
        el("h2", "Syncer"),
        table("The syncer against its limits", names, found),
        el("p", f"Dropped: {dropped}.") if dropped else None,
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def fragments(view: RunView) -> Html | None:
    """Each fragment's version and age."""
    if not view.fragments:
        return None
    late = 2 * view.setting("sync.interval", 1)
    cells = []
    for one in view.fragments:
        old = one.age_steps > late
        age = "never merged" if one.age_seconds is None else f"{one.age_steps} steps old"
        said = (el("b", f"{one.fragment}"), f"version {one.version}", f"{'▲ ' if old else ''}{age}")
        cells.append(el("li", [el("span", line) for line in said], class_="old" if old else None))
    return el("section", el("h2", "Fragments"), el("ul", cells, class_="fragments"))


def rounds(view: RunView) -> Html | None:
    """The last rounds, and who was in."""
    if not view.rounds:
        return None
    everybody = [one.learner for one in view.learners]
    names = ("step", "when", "fragment", "version", "who was in", "quorum after", "grace", "merge")
    rows = [
        (
            one.step,
            clock(one.time),
            one.fragment,
            one.version,
            _who(one.learners, everybody),
            seconds(one.quorum_seconds),
            seconds(one.grace_seconds),
            seconds(one.sync_seconds),
        )
        for one in view.rounds
    ]
    return el(
        "details", el("summary", "The last rounds"), table("The last rounds, newest first", names, rows)
    )


def _who(learners: Sequence[int], everybody: Sequence[int]) -> Html:
    signs = "".join("●" if one in learners else "·" for one in everybody)
    missing = [str(one) for one in everybody if one not in learners]
    told = f"{len(learners)} of {len(everybody)}" + (f", without {', '.join(missing)}" if missing else "")
    seen = el("span", signs, class_="who", aria_hidden="true")
    return el("span", seen, el("span", told, class_="spoken"), title=told)


def alarms(view: RunView) -> Html:
    """Alarms with what to do about them, and what else happened."""
    shown = [_event(event) for event in view.events if event.alarm]
    quiet = [_event(event) for event in view.events if not event.alarm]
    others = el("summary", f"What else happened ({len(quiet)})"), el("ol", quiet, class_="alarms")
    return el(
        "section",
        el("h2", f"Alarms: {len(shown)}" if shown else "No alarm"),
        el("ol", shown, class_="alarms") if shown else None,
        el("details", others) if quiet else None,
    )


def _event(event: EventView) -> Html:
    told = remedy(event.text) if event.alarm else None
    do = el("p", el("em", "What to do: "), told) if told else None
    return el("li", el("time", "" if event.time is None else clock(event.time)), el("div", event.text, do))


def settings(view: RunView) -> Html:
    """The resolved settings, what the run was on, and its summary, as they are."""
    shown = {"Settings": view.config, "Versions and hardware": view.environment, "Summary": view.summary}
    folds = [
        el("details", el("summary", name), el("pre", json.dumps(values, indent=2), tabindex="0"))
        for name, values in shown.items()
    ]
    return el("section", folds)
