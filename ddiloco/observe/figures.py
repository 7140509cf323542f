"""What all figures share: they are written whole or not at all, and look alike."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddiloco.observe.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextlib.contextmanager
def figure_at(path: pathlib.Path, width: float, height: float, dpi: int = 130) -> Iterator[Figure]:
    """An empty figure, in inches; at the end of the `with` block it is written to `path` as PNG.

    Raises OSError where the disk refuses; no half-written figure is left.
    """
    # Matplotlib takes a second to import; only programs that draw should wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    yield figure
    with replacing(path) as new:
        FigureCanvasAgg(figure).print_png(new)


def colours(count: int) -> list[tuple[float, ...]]:
    """`count` colours (red, green, blue) that are easy to distinguish."""
    from matplotlib import colormaps

    table = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [table(place)[:3] for place in range(count)]


def dress(axes: Axes, grid: str = "both") -> None:
    """A light grid along "x", "y" or "both", behind what is drawn, and no frame above and on the right."""
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)
