"""The figure of a comparison: what it shows of its runs, and that what is written in it can be read."""

import contextlib
import itertools

import pytest

from ddiloco.telemetry import plots
from experiments.studies import comparison, figures


def row(label, ratio, scores=()):
    """A row of one run, as `comparison.digest` gives it."""
    mean = dict.fromkeys(comparison.COLUMNS) | {"time_ratio": ratio}
    run = {"finished": True, "driver": "virtual", "eval_history": list(scores)}
    std = dict.fromkeys(comparison.COLUMNS)
    return {"label": label, "paper": {}, "mean": mean, "std": std, "lost": {}, "runs": [run]}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws these rows, and gives what `look` finds in the panel whose x axis has this in its title."""

    def draw(rows, title, look):
        found = []

        @contextlib.contextmanager
        def figure_at(*arguments, **more):
            with plots.figure_at(*arguments, **more) as figure:
                yield figure
            [axes] = [axes for axes in figure.axes if title in axes.get_xlabel()]
            found.extend(look(axes))

        monkeypatch.setattr(figures, "figure_at", figure_at)
        figures.draw_comparison(tmp_path / "figure.png", rows)
        return found

    return draw


def labels(axes):
    """Where the labels of the x axis begin and end."""
    left, right = axes.get_xlim()
    ticks = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    shown = [tick for tick in ticks if tick.get_text() and left <= tick.get_position()[0] <= right]
    return sorted((box.x0, box.x1) for box in (tick.get_window_extent() for tick in shown))


@pytest.mark.parametrize("most", [3.0, 7.0, 4000.0])
def test_the_bytes_below_the_curves_can_be_read(most, drawn):
    sent = [2e6 * most ** (n / 3) for n in range(4)]
    scores = [{"tokens": n, "seconds": n, "loss": 5.0 - n, "bytes": sent[n]} for n in range(4)]
    boxes = drawn([row("first", 1.0, scores)], "bytes over the links", labels)
    assert boxes and all(before < after for (_, before), (after, _) in itertools.pairwise(boxes))


def beyond_their_bars(axes):
    """How far the texts of bars begin and end beyond these."""
    ends = [bar.get_window_extent().x1 for bar in axes.patches]
    texts = [text.get_window_extent() for text in axes.texts]
    return [(box.x0 - end, box.x1 - end) for box, end in zip(texts, ends, strict=True)]


def test_the_time_of_a_short_bar_stands_beside_it(drawn):
    (_, whole), (short, _) = drawn([row("first", 1.0), row("second", 0.04)], "relative to", beyond_their_bars)
    assert whole < 0 < short


SCORES = [{"tokens": n, "bytes": 10.0 * n, "loss": 3.0 - n, "accuracy": n / 4} for n in range(4)]


def test_curves_against_bytes_begin_where_there_are_any_and_accuracy_has_its_own():
    rows = {"runs": [{"eval_history": SCORES[:3]}, {"eval_history": [{"tokens": 0, "loss": None}]}]}
    assert figures.curves_of(rows, "bytes", "loss") == [[(10.0, 2.0), (20.0, 1.0)], []]
    assert figures.curves_of(rows, "tokens", "accuracy") == [[(0, 0.0), (1, 0.25), (2, 0.5)], []]
    assert figures.ends_of(rows, "loss") == [1.0] and figures.ends_of(rows, "accuracy") == [0.5]


def test_the_mean_of_curves_is_where_all_of_them_are():
    mean = figures.mean_curve([[(0, 4.0), (10, 2.0)], [(5, 1.0), (20, 1.0)]])
    assert mean == [(5, 2.0), (10, 1.5)]
    assert figures.mean_curve([[(0, 1.0), (1, 1.0)], [(2, 1.0), (3, 1.0)]]) == []


def test_runs_that_were_scored_at_their_ends_alone_have_dots_and_no_curves():
    lines = [figures.comparison_panels([row("first", 1.0, SCORES[:n])]) for n in (2, 4)]
    drawn = [[panel.func.__name__ for line in found for panel in line] for found in lines]
    assert drawn == [["_draw_ends"] * 2, ["_draw_curves"] * 4]


@pytest.mark.parametrize("rows", [[], [row("nothing", None)], [row(name, 1.0, SCORES) for name in "ab"]])
def test_a_figure_is_drawn_of_whatever_there_is(rows, tmp_path):
    for one in rows:
        one["mean"]["goodput"], one["lost"], one["paper"] = 0.9, {"failed": 0.1}, {"goodput": 0.8}
    figures.draw_comparison(tmp_path / "figure.png", rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
