"""The figure of a comparison: that what is written in it can be read."""

import contextlib
import itertools

import pytest

from ddiloco.telemetry import plots
from experiments.studies import comparison, comparison_figure


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

        monkeypatch.setattr(comparison_figure, "figure_at", figure_at)
        comparison_figure.draw(tmp_path / "figure.png", rows)
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
