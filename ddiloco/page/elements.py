"""Elements of HTML and SVG as text; whatever is not an element already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_EMPTY = frozenset({"link", "meta", "path", "line", "rect", "input", "br"})


class Html(str):
    """Text that is HTML already, and may stand as it is."""

    __slots__ = ()


def el(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. Children are text or elements, or lists of them; None is left out.

    Attributes that are None or False are left out; `class_` is class, and other underscores are hyphens.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{"" if value is True else html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Html(f"<{name}{given}/>" if name in ("path", "line", "rect") else f"<{name}{given}>")
    return Html(f"<{name}{given}>{text(children)}</{name}>")


def text(children: Iterable[Any]) -> Html:
    """The children one after the other."""
    return Html("".join(_one(child) for child in children if child is not None))


def table(caption: str, names: Iterable[Any], rows: Iterable[Iterable[Any]], **attributes: Any) -> Html:
    """A table whose first column names its rows; each cell knows its column's name, for narrow screens."""
    names = list(names)
    body = [
        el(
            "tr",
            [
                el("th", cell, scope="row") if place == 0 else el("td", cell, data_label=names[place])
                for place, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    head = el("tr", [el("th", name, scope="col") if name else el("td") for name in names])
    whole = el("table", el("caption", caption), el("thead", head), el("tbody", body), **attributes)
    return el("div", whole, class_="scroll", tabindex="0", role="group", aria_label=caption)


def _one(child: Any) -> str:
    if isinstance(child, Html):
        return child
    return text(child) if isinstance(child, list | tuple) else html.escape(str(child), quote=False)
