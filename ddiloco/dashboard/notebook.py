"""The page of runs as a notebook shows it below a cell."""

from __future__ import annotations

import html
import pathlib

from ddiloco.dashboard.sheet import document
from ddiloco.dashboard.view import read_views


class Page:
    """The page of one run or of several side by side, as they are now; the last value of a notebook's cell.

    It needs no network, and no script.
    """

    def __init__(self, *workdirs: pathlib.Path | str, height: int = 900) -> None:
        """`height`: of the frame in the notebook, in pixels."""
        self.html = document(read_views([pathlib.Path(workdir) for workdir in workdirs]), inline=True)
        self._height = height

    def _repr_html_(self) -> str:
        """What Jupyter and Colab show: a frame of its own, so that styles do not mix."""
        frame = 'width="100%" style="border: 0" title="The page of the run"'
        return f'<iframe srcdoc="{html.escape(self.html)}" height="{self._height}" {frame}></iframe>'
