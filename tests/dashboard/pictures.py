"""Makes the pictures of docs/dashboard.md in Chromium: `python -m tests.dashboard.pictures [NAME...]`."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from ddiloco.dashboard.sheet import document
from ddiloco.dashboard.view import read_views
from ddiloco.workers.learner_arrays import TrainingArrays
from tests import conftest, workbench
from tests.dashboard import planted

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "dashboard"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
FLAGS += ("--run-all-compositor-stages-before-draw", "--virtual-time-budget=10000")
sound = functools.partial(planted.with_arrays, arrays=TrainingArrays, learners=4, interval=12, steps=72)
PICTURES = {  # a run, the width and height of its picture, and whether that is dark
    "thin-link": (functools.partial(sound, bandwidth=[1e9, 1e9, 1e9, 1.6e3]), 1240, 900, True),
    "slow-disk": (functools.partial(planted.with_slow_disk, run=sound), 1240, 900, False),
    "nan-learner": (planted.with_arrays, 1240, 900, False),
    "dead-learner": (functools.partial(sound, availability="trace"), 500, 1160, False),
    "missing-host": (planted.with_missing_host, 1240, 760, False),
}
LIVES = "time,learner,event,share\n12,1,fail,\n20,1,recover,\n55,2,fail,\n"


def main() -> None:
    os.environ["CI"] = "true"  # nothing of the runs' progress
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        (folder / "availability.csv").write_text(LIVES)
        for name in sys.argv[1:] or PICTURES:
            plant, width, height, dark = PICTURES[name]
            more = {"trace": str(folder / "availability.csv")} if name == "dead-learner" else {}
            view = read_views([plant(folder / name, workbench.data_folder(), **more)])[0]
            (folder / "page.html").write_text(document([view], inline=True))
            narrow = "_narrow" if width < 600 else ""
            flags = (
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--user-data-dir={conftest.KEPT / 'chromium'}",
                f"--window-size={width},{height}",
                f"--screenshot={DOCS / name.replace('-', '_')}{narrow}.png",
            )
            page = (folder / "page.html").as_uri()
            subprocess.run([chromium, *FLAGS, *flags, page], check=True, capture_output=True)


if __name__ == "__main__":
    main()
