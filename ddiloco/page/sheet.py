"""The page of a run, or of several side by side: from views to one HTML document."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddiloco.observe.words import amount, seconds, share
from ddiloco.page import sections
from ddiloco.page.advice import Advice, advice
from ddiloco.page.drawings import Line, chart, patterns
from ddiloco.page.elements import Html, el, table
from ddiloco.page.view import RunView


def document(
    views: Sequence[RunView], live: bool = False, inline: bool = False, dialog: Html | None = None
) -> str:
    """The whole page. `live`: it asks for news; `inline`: it is one file by itself; `dialog`: for actions."""
    names = ", ".join(view.name for view in views)
    style = el("style", Html(asset("page.css"))) if inline else el("link", rel="stylesheet", href="page.css")
    script = el("script", "", src="page.js", defer=True) if live else None
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{names} · ddiloco"),
        style,
        script,
        None if dialog is None else el("script", "", src="actions.js", defer=True),
    )
    skip = el("a", "Skip to the learners", href="#r0-learners", class_="skip")
    news = el("p", "", id="news", role="status") if live else None
    body = el("body", skip, patterns(), news, dialog, el("main", content(views, live), id="content"))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def content(views: Sequence[RunView], live: bool = False) -> Html:
    """What is in the page, and replaced when there are news."""
    single = len(views) == 1
    runs = [_run(view, f"r{place}", live) for place, view in enumerate(views)]
    return el(
        "div",
        None if single else comparison(views),
        el("div", runs, class_="runs" if single else "runs several"),
    )


def asset(name: str) -> str:
    """A file of this package."""
    return (importlib.resources.files("ddiloco.page") / name).read_text()


def _run(view: RunView, key: str, live: bool) -> Html:
    found = advice(view)
    parts = [
        _head(view, live),
        _verdict(view, found, key),
        _figures(view),
        sections.learners(view, found, key),
        sections.curves(view, found),
        el("div", sections.lost(view), sections.syncer(view), class_="columns"),
        sections.fragments(view),
        sections.rounds(view),
        sections.alarms(view),
        sections.settings(view),
    ]
    return el("article", [part for part in parts if part], id=key, aria_label=f"run {view.name}")


def _head(view: RunView, live: bool) -> Html:
    summary = view.summary
    step, total = summary.get("step") or 0, summary.get("total_steps")
    said = [view.status, f"step {step} of {total}" if total else "no step yet", seconds(view.now)]
    if view.virtual:
        said[-1] += " of virtual time"
    if view.status == "running" and total and step:
        said.append(f"about {seconds(view.now * (total - step) / step)} left")
    about = [summary.get("algorithm"), f"{len(view.learners)} learners"]
    if summary.get("num_params"):
        about.append(f"{amount(summary['num_params'])} parameters in {len(view.fragments)} fragments")
    links = el("nav", el("a", "report", href="report"), " ", el("a", "view as JSON", href="view.json"))
    return el(
        "header",
        el("h1", view.name, el("span", view.status, class_=f"badge {view.status}")),
        el("p", " · ".join(said[1:]), class_="lead"),
        el("p", " · ".join(str(word) for word in about if word), class_="quiet"),
        None if view.whole else el("p", "Still reading what the run has left: there is more.", class_="lead"),
        links if live else None,
    )


def _verdict(view: RunView, found: Sequence[Advice], key: str) -> Html:
    troubles = sum(one.trouble for one in found)
    if not found:
        title = "Nothing is in trouble"
    elif troubles:
        title = "In trouble: what, why, and what to do"
    else:
        title = "Nothing is broken; this could be better"
    return el(
        "section",
        el("h2", title),
        el("ul", [_advised(one, key) for one in found], class_="advice") if found else None,
        class_="verdict bad" if troubles else "verdict",
    )


def _advised(one: Advice, key: str) -> Html:
    mark = el("span", "✖" if one.trouble else "▲", class_="mark", aria_hidden="true")
    kind = el("span", "Trouble: " if one.trouble else "Advice: ", class_="spoken")
    what = one.what if one.learner is None else el("a", one.what, href=f"#{key}-learner-{one.learner}")
    body = el("div", el("strong", kind, what), el("p", one.why), el("p", el("em", "What to do: "), one.do))
    return el("li", mark, body, class_="trouble" if one.trouble else "better")


def figures(view: RunView) -> dict[str, str]:
    """The figures that say most of a run, by name."""
    s = view.summary
    loss = s.get("eval_loss")
    found = {
        "goodput": share(s.get("goodput")),
        "uptime": share(s.get("uptime")),
        "merged": share(s.get("merged_share")),
        "tokens/s": amount(s.get("tokens_per_second")),
        "tokens": amount(sum(one.tokens for one in view.learners)),
        "held-out loss": "-" if loss is None else f"{loss:.4f}",
        "train loss": "-" if s.get("train_loss") is None else f"{s['train_loss']:.4f}",
        "mean quorum": "-" if view.syncer.mean_quorum is None else f"{view.syncer.mean_quorum:.2f}",
    }
    if s.get("mfu") is not None:
        found["MFU"] = share(s["mfu"])
    return found


def _figures(view: RunView) -> Html:
    tiles = [el("div", el("dt", name), el("dd", value)) for name, value in figures(view).items()]
    return el("dl", tiles, class_="figures")


def comparison(views: Sequence[RunView]) -> Html:
    """Figures and settings of several runs side by side, and their losses in one drawing."""
    names = ["", *(view.name for view in views)]
    shown = [figures(view) for view in views]
    rows = [[name, *(one.get(name, "-") for one in shown)] for name in shown[0]]
    flat = [dict(_flat(view.config)) for view in views]
    paths = sorted(set().union(*flat))
    different = [path for path in paths if len({json.dumps(one.get(path)) for one in flat}) > 1]
    settings = [[path, *(json.dumps(one.get(path)) for one in flat)] for path in different]
    scores = [view.summary.get("eval_history") or [] for view in views]
    most = max((score["tokens"] for of_one in scores for score in of_one), default=0)
    losses = [
        Line(view.name, *sections.pairs(of_one, "tokens"), place)
        for place, (view, of_one) in enumerate(zip(views, scores, strict=True))
    ]
    drawn = chart("Loss of the global model, held-out", "nats/token", losses, most, x="tokens")
    return el(
        "section",
        el("h1", "Runs side by side"),
        el("div", table("Figures", names, rows), drawn, class_="columns"),
        table("Settings that differ", names, settings) if settings else None,
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
