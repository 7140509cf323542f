"""The page of a run, or of several side by side: views, rendered by the templates beside this file.

Lanes of states, and curves over time, are paths of an SVG that stretches with the page. Labels are text of
the page beside the drawing, so that they stay readable at any width. What colour says is said by form too: a
lane's states differ in height and hatching, curves in their dashes.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddiloco.config import flat
from ddiloco.dashboard.advice import Advice, advice, remedy
from ddiloco.dashboard.view import HostView, LearnerView, RunView, Values
from ddiloco.telemetry import formatting
from ddiloco.telemetry.formatting import amount, clock, number, seconds, share, size
from ddiloco.telemetry.series import StateSpan

if TYPE_CHECKING:
    import jinja2

WIDTH, HEIGHT = 1000, 200
STATES = {
    "stepping": (1, 18, "steps"),
    "waiting": (10, 9, "waits for peers or network"),
    "recovering": (1, 18, "starts, joins or recovers"),
    "spare": (15, 4, "spare"),
    "hung": (1, 18, "hangs, or is silent"),
    "dead": (8, 4, "dead"),
    "finished": (17, 2, "has finished"),
}
"""Of a lane's states: top, height, and what it means."""

HOST_STATES = {"connected": (5, 14, "host connected"), "gone": (11, 3, "host not connected")}

_FORMS = STATES | HOST_STATES
_MERGED = (22, 6)  # top and height of the strip below, which shows the share of merges that it was in
COLOURS = 8

FEW = 8  # learners that have a colour each
MAX_HOSTS = 8  # of a learner that have a lane each
_CAUSES = {
    "skipping": "skipped steps",
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
_IF_KNOWN = ("data wait", "MFU")  # columns of measurements, which some runs do not have


def document(views: Sequence[RunView], live: bool = False, inline: bool = False) -> str:
    """The whole page. `live`: it requests updates; `inline`: it is one self-contained file."""
    return render("page.html", views=views, live=live, inline=inline)


def render(template: str, **values: Any) -> str:
    """A template of this package with these values."""
    return _templates().get_template(template).render(**values)


def content(views: Sequence[RunView], live: bool = False) -> str:
    """The part of the page that updates replace."""
    return render("content.html", views=views, live=live)


def gate() -> str:
    """The page that asks for the token."""
    return render("gate.html")


def asset(name: str) -> str:
    """A file of this package."""
    return (importlib.resources.files("ddiloco.dashboard") / name).read_text()


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # only where somebody looks

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(formatting, name) for name in ("amount", "clock", "seconds", "share")}
    made.globals |= {
        "WIDTH": WIDTH,
        "HEIGHT": HEIGHT,
        **{one.__name__: one for one in (forms, strip, legend)},
        **{one.__name__: one for one in (asset, advice, remedy, progress, about, figures, columns)},
        **{one.__name__: one for one in (in_order, hosts_of)},
        **{one.__name__: one for one in (in_words, charts, where_time_went, limits, last_rounds)},
        **{one.__name__: one for one in (figures_of, settings_that_differ, losses_of)},
        "dumps": json.dumps,
    }
    return made


def progress(view: RunView) -> list[str]:
    """Progress and duration of a run."""
    step, total = view.summary.get("step") or 0, view.summary.get("total_steps")
    elapsed = f"{seconds(view.now)}{' of virtual time' if view.virtual else ''}"
    parts = [f"step {step} of {total}" if total else "no step yet", elapsed]
    if view.status == "running" and total and step:
        parts.append(f"about {seconds(view.now * (total - step) / step)} left")
    return parts


def about(view: RunView) -> list[str]:
    """The model and its learners."""
    fragments = len(view.fragments)  # of a baseline none
    parts = [view.summary.get("algorithm"), f"{len(view.learners)} learners" if fragments else "one job"]
    if size := view.summary.get("num_params"):
        parts.append(f"{amount(size)} parameters{f' in {fragments} fragments' if fragments else ''}")
    return [part for part in (*parts, view.timing) if part]


def figures(view: RunView) -> dict[str, str]:
    """The main figures of a run, by name."""
    s = view.summary
    found = {
        "goodput": share(s.get("goodput")),
        "uptime": share(s.get("uptime")),
        "merged": share(s.get("merged_share")),
        "tokens/s": amount(s.get("tokens_per_second")),
        "tokens": amount(sum(one.tokens for one in view.learners)),
        "held-out loss": number(s.get("eval_loss"), ".4f"),
        "train loss": number(s.get("train_loss"), ".4f"),
        "mean quorum": number(view.syncer.mean_quorum, ".2f"),
    }
    if s.get("merge_shock") is not None:
        found["merge shock"] = number(s["merge_shock"], "+.4f")
    if s.get("eval_accuracy") is not None:
        found["accuracy"] = f"{s['eval_accuracy']:.1%}"
    if s.get("mfu") is not None:
        found["MFU"] = share(s["mfu"])
    if s.get("epsilon") is not None:
        found["epsilon"] = f"{s['epsilon']:.2f}"
    return found


def columns(view: RunView) -> dict[str, Callable[[LearnerView], str]]:
    """The figures of each learner of this run, by column."""
    return {
        name: text_of
        for name, text_of in _COLUMNS.items()
        if name not in _IF_KNOWN or any(text_of(one) != "-" for one in view.learners)
    }


def in_order(view: RunView, found: Sequence[Advice]) -> list[LearnerView]:
    """The learners; of many, those with advice come first: a phone shows a few at a time."""
    if len(view.learners) <= FEW:
        return list(view.learners)
    known = {one.learner for one in found}
    return sorted(view.learners, key=lambda one: one.learner not in known)


def hosts_of(one: LearnerView) -> tuple[list[HostView], list[HostView]]:
    """The hosts of a learner that are shown, lost and newest ones first if there are many; and the others."""
    known = sorted(one.hosts, key=lambda at: (at.state != "gone", at.state_seconds))
    return sorted(known[:MAX_HOSTS], key=lambda at: at.host), known[MAX_HOSTS:]


def in_words(spans: Sequence[StateSpan]) -> str:
    """The states of a lane as text."""
    total: dict[str, float] = {}
    for state, start, end in spans:
        total[state] = total.get(state, 0.0) + end - start
    return ", ".join(f"{state} {seconds(spent)}" for state, spent in total.items() if spent > 0)


def charts(view: RunView, found: Sequence[Advice]) -> list[Chart | None]:
    """Losses, tokens a second, merged learners and round times, over time."""
    middles = [(place + 0.5) * view.slot_seconds for place in range(len(view.tokens_per_second))]
    troubled = {one.learner for one in found}
    losses = []
    for place, one in enumerate(view.learners):
        shown = len(view.learners) <= FEW or one.learner in troubled
        losses.append(ChartLine(f"learner {one.learner}", middles, one.loss, place if shown else None))
    moments, scores = _scores(view, "seconds")
    shown_from = view.started - view.summary.get("started", view.started)
    held_out = ChartLine("global model, held-out", [moment - shown_from for moment in moments], scores, -1)
    rate = ChartLine("tokens/s", middles, view.tokens_per_second, 0)
    found_charts = [
        chart("Loss", "nats/token", [*losses, held_out], view.now),
        chart("Tokens a second", "all learners", [rate], view.now, zero=True),
    ]
    if view.syncer.rounds:
        who = [ChartLine("in the merge", middles, view.quorum, 0), ChartLine("there", middles, view.live, 1)]
        spent = [
            ChartLine("until the quorum", middles, view.quorum_seconds, 0),
            ChartLine("grace", middles, view.grace_seconds, 1),
            ChartLine("merge and write", middles, view.sync_seconds, 2),
        ]
        found_charts += [
            chart("Learners in a merge", "", who, view.now, zero=True),
            chart("Time of a round", "seconds", spent, view.now, zero=True),
        ]
    return found_charts


def _scores(view: RunView, over: str) -> tuple[list[float], list[float | None]]:
    """Seconds or tokens, and losses, of the scores that there are."""
    known = [score for score in view.summary.get("eval_history") or [] if score.get("loss") is not None]
    return [score[over] for score in known], [score["loss"] for score in known]


def where_time_went(view: RunView) -> list[tuple[str, float | None, float | None]]:
    """The share of the chips' time that they stepped, and of each cause of loss, the largest first."""
    lost = {cause: part for cause, part in (view.summary.get("lost") or {}).items() if part}
    largest = sorted(lost.items(), key=lambda item: -item[1])
    spent = {"stepping": view.summary.get("goodput")}
    spent |= {_CAUSES.get(cause, cause): part for cause, part in largest}
    return [(name, part, part) for name, part in spent.items()]


def limits(view: RunView) -> list[tuple[str, Any, str]]:
    """The syncer's load beside its limits, as far as known."""
    s = view.syncer
    each = f"{seconds(None if not s.due_per_second else 1 / s.due_per_second)} from round to round"
    rows = [
        ("merges a second", number(s.rounds_per_second, ".3g"), f"{number(s.due_per_second, '.3g')} are due"),
        ("merging and writing", share(s.busy), "100% of its time"),
        ("a round, until it is written", seconds(s.sync_seconds), each),
        ("the merge alone", None if s.merge_seconds is None else seconds(s.merge_seconds), each),
        ("the disk", None if s.disk_seconds is None else seconds(s.disk_seconds), each),
        ("messages that wait", s.inbox, "no bound; it is at its limit if they grow"),
        ("merges that wait", s.merging, "one is made at a time"),
        ("bytes in", f"{size(s.in_per_second)}/s", "its network; not measured"),
        ("bytes out", f"{size(s.out_per_second)}/s", "its network; not measured"),
        (
            "learners in a merge",
            number(s.mean_quorum, ".3g"),
            f"{len(view.learners)}; {share(s.mean_share)} of those there",
        ),
        ("rounds left out", s.skipped, f"0, of {s.rounds}; {s.abandoned} more had no quorum"),
    ]
    return [row for row in rows if row[1] is not None]


def last_rounds(view: RunView) -> list[tuple[Any, ...]]:
    """The last rounds, newest first; who was in as signs, and in words."""
    everybody = [one.learner for one in view.learners]
    return [
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


def _who(learners: Sequence[int], everybody: Sequence[int]) -> tuple[str, str]:
    missing = [str(one) for one in everybody if one not in learners]
    text = f"{len(learners)} of {len(everybody)}" + (f", without {', '.join(missing)}" if missing else "")
    return "".join("●" if one in learners else "·" for one in everybody), text


def figures_of(views: Sequence[RunView]) -> list[list[str]]:
    """The figures of several runs, a row for each."""
    shown = [figures(view) for view in views]
    names = dict.fromkeys(name for one in shown for name in one)
    return [[name, *(one.get(name, "-") for one in shown)] for name in names]


def settings_that_differ(views: Sequence[RunView]) -> list[list[str]]:
    """A row for each setting in which the runs differ."""
    each = [flat(view.config) for view in views]
    rows = [[path, *(json.dumps(one.get(path)) for one in each)] for path in sorted(set().union(*each))]
    return [row for row in rows if len(set(row[1:])) > 1]


def losses_of(views: Sequence[RunView]) -> Chart | None:
    """The held-out losses of several runs over tokens."""
    scores = [_scores(view, "tokens") for view in views]
    most = max((tokens for of_one, _ in scores for tokens in of_one), default=0)
    lines = [ChartLine(view.name, *scores[place], place) for place, view in enumerate(views)]
    return chart("Loss of the global model, held-out", "nats/token", lines, most, x="tokens")


class ChartLine(NamedTuple):
    """A curve: `place` is its colour and dashes, None for one of many in grey, -1 for the global model."""

    label: str
    xs: Sequence[float]
    ys: Values
    place: int | None = None


class ChartCurve(NamedTuple):
    """A line as it is drawn."""

    label: str
    path: str
    look: str  # its class in page.css


class Chart(NamedTuple):
    """Curves with their axes; `content.html` draws it."""

    title: str
    unit: str
    x: str  # what it is over, if not over time
    end: float
    ticks: Sequence[float]
    curves: Sequence[ChartCurve]
    named: Sequence[ChartCurve]  # those that the legend has
    in_words: str


def forms(spans: Sequence[StateSpan], end: float) -> list[tuple[str, str]]:
    """The states of a lane from the beginning of the run to `end` (seconds), and each one's path."""
    scale = WIDTH / max(end, 1e-9)
    paths: dict[str, list[str]] = {}
    for state, start, finish in spans:
        if state in _FORMS and finish > start:
            top, height, _ = _FORMS[state]
            width = max(1.0, (min(finish, end) - start) * scale)
            paths.setdefault(state, []).append(
                f"M{start * scale:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z"
            )
    return [(state, "".join(paths[state])) for state in _FORMS if state in paths]


def strip(merged: Values, slot_seconds: float, end: float) -> str:
    """The path of a lane's strip: bars as high as each share, in quarters; one for slots of the same."""
    width = slot_seconds * WIDTH / max(end, 1e-9)
    bars: list[tuple[int, int]] = []  # from which slot, how many quarters
    known = [(place, math.ceil(4 * share)) for place, share in enumerate(merged) if share is not None]
    for place, quarters in known:
        if not bars or quarters != bars[-1][1]:
            bars.append((place, quarters))
    ends = [start for start, _ in bars[1:]] + [place + 1 for place, _ in known[-1:]]
    top, height = _MERGED
    path = []
    for (start, quarters), finish in zip(bars, ends, strict=True):
        if quarters > 0:
            tall = height * quarters / 4
            x, w = start * width, (finish - start) * width
            path.append(f"M{x:.1f} {top + height - tall:.1f}h{w:.1f}v{tall:.1f}h-{w:.1f}z")
    return "".join(path)


def legend(view: RunView) -> dict[str, tuple[int, int, str]]:
    """The forms of a lane in this run, and what they mean."""
    shown = _FORMS if any(one.hosts for one in view.learners) else STATES
    return {state: form for state, form in shown.items() if state != "spare"}


def chart(
    title: str, unit: str, lines: Sequence[ChartLine], end: float, zero: bool = False, x: str = ""
) -> Chart | None:
    """Curves over time up to `end` (seconds), or over `x` if that is named; None if nothing is known."""
    values = [y for line in lines for y in line.ys if y is not None]
    if not values:
        return None
    ticks = _ticks(values, zero)
    curves = [ChartCurve(line.label, _path(line, end, ticks[0], ticks[-1]), _look(line)) for line in lines]
    known = [[y for y in line.ys if y is not None and line.place is not None] for line in lines]
    named = [(curve, ys[-1]) for curve, ys in zip(curves, known, strict=True) if ys]
    last_values = "; ".join(f"{curve.label} {amount(value)}" for curve, value in named)
    in_words = f"{title}{unit and f' in {unit}'}. At the end: {last_values}."
    return Chart(title, unit, x, end, ticks, curves, [curve for curve, _ in named], in_words)


def _look(line: ChartLine) -> str:
    if line.place is None:
        return "curve many"
    return "curve global" if line.place < 0 else f"curve c{line.place % COLOURS}"


def _path(line: ChartLine, end: float, low: float, high: float) -> str:
    across, up = WIDTH / max(end, 1e-9), HEIGHT / max(high - low, 1e-12)
    points = [
        (x * across, HEIGHT - (y - low) * up) for x, y in zip(line.xs, line.ys, strict=True) if y is not None
    ]
    path = "".join(f"{'L' if place else 'M'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    if len(points) == 1:  # a dot
        path += "h1"
    return path


def _ticks(values: Sequence[float], zero: bool) -> list[float]:
    """Four to seven round numbers that enclose all values; what sticks out far above is cut off."""
    ordered = sorted(values)
    low, high = (0.0 if zero else ordered[0]), ordered[-1]
    if not zero and len(ordered) > 20:
        high = min(high, ordered[len(ordered) * 98 // 100] + (ordered[-1] - low) / 8)
    if high - low < 1e-9:
        high = low + (abs(low) or 1.0)
    power = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if 5 * power * times >= (high - low) * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, last + 1)]
