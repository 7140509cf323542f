"""Makes the pictures of a run's page in Chromium: `python -m tests.dashboard.pictures [NAME...]`.

NAME is a picture of docs/dashboard.md, `sweep`, that of docs/studies.md, or `killed`, README's
animation of processes of which one is killed.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

from PIL import Image

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


LISTEN, PAGE = "127.0.0.1:7079", "127.0.0.1:7080"
SETTINGS = {  # of the animation's run
    "train.steps": 600,
    "train.min_step_seconds": (0.2,) * 4,
    "eval.every": 0,
    "log.page": PAGE,
}
SECONDS = 1.5  # between two of its frames, that show it four times as fast
KILLED, BACK, FRAMES = 14, 19, 48  # frames: after these learner 2 is killed, and started again; all
PAGE_SIZE, GIF_SIZE = (1240, 620), (930, 465)


def screenshot(page: pathlib.Path, width: int, height: int, dark: bool, picture: pathlib.Path) -> None:
    """Chromium's picture of a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or sys.exit("there is no Chromium")
    flags = (
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--user-data-dir={conftest.KEPT / 'chromium'}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
    )
    subprocess.run([chromium, *FLAGS, *flags, page.as_uri()], check=True, capture_output=True)


def reports(workdir: pathlib.Path, data: str) -> list[str]:
    """The pages of a run of processes while one of them is killed and started again."""
    more = [f"--config.{name}={value}" for name, value in {**SETTINGS, "data.data_dir": data}.items()]

    def start(program: str, *own: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            f"experiments.{program}",
            "--config=configs/micro.py:dense",
            *more,
            *own,
        ]
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        return running.enter_context(started)

    environment = {**os.environ, "XLA_FLAGS": ""}  # one device each, unlike the tests
    found, tick = [], threading.Event()
    with contextlib.ExitStack() as running:
        syncer = start("syncer", f"--listen={LISTEN}", f"--workdir={workdir}")
        learners = [start("learner", f"--syncer={LISTEN}", f"--learner_id={m}") for m in range(4)]
        while len(found) < FRAMES and all(one.poll() is None for one in (syncer, *learners[:2])):
            tick.wait(SECONDS)
            try:
                with urllib.request.urlopen(f"http://{PAGE}/report") as answer:
                    page = answer.read().decode()
            except urllib.error.URLError:
                continue
            if found or page.count('"now">stepping') >= 4:
                found.append(page)
                if len(found) == KILLED:
                    learners[2].kill()
                if len(found) == BACK:
                    learners[2] = start("learner", f"--syncer={LISTEN}", "--learner_id=2")
        for process in (*learners, syncer):
            process.terminate()
    return found


def animate(folder: pathlib.Path) -> None:
    """README's animation."""
    frames = []
    for number, page in enumerate(reports(folder / "killed", workbench.data_folder())):
        (folder / "page.html").write_text(page)
        screenshot(folder / "page.html", *PAGE_SIZE, True, folder / f"{number}.png")
        shown = Image.open(folder / f"{number}.png").convert("RGB").resize(GIF_SIZE, Image.Resampling.LANCZOS)
        frames.append(shown.quantize(16, dither=Image.Dither.NONE))
    frames[0].save(
        DOCS / "killed.gif", save_all=True, append_images=frames[1:], duration=375, loop=0, optimize=True
    )


GRID = "sync.num_learners=1,2,4;outer.learning_rate=0.5,0.7,1.0;seed=0,1"


def sweep(folder: pathlib.Path) -> None:
    """The page of a sweep of small loops."""
    given = {"config": "configs/loop.py", "sweep": GRID, "output": folder / "rates", "jobs": 2}
    settings = {"driver": "virtual", "train.steps": 80, "eval.every": 8}
    given |= {f"config.{name}": value for name, value in settings.items()}
    command = [
        sys.executable,
        "-m",
        "experiments.sweep",
        *(f"--{name}={value}" for name, value in given.items()),
    ]
    subprocess.run(command, check=True, env={**os.environ, "XLA_FLAGS": ""})
    screenshot(folder / "rates" / "sweep.html", 1240, 1000, False, DOCS / "sweep.png")


def main() -> None:
    os.environ["CI"] = "true"  # nothing of the runs' progress
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        (folder / "availability.csv").write_text(LIVES)
        for name in sys.argv[1:] or (*PICTURES, "sweep", "killed"):
            if name in ("sweep", "killed"):
                {"sweep": sweep, "killed": animate}[name](folder)
                continue
            plant, width, height, dark = PICTURES[name]
            more = {"trace": str(folder / "availability.csv")} if name == "dead-learner" else {}
            view = read_views([plant(folder / name, workbench.data_folder(), **more)])[0]
            (folder / "page.html").write_text(document([view], inline=True))
            narrow = "_narrow" if width < 600 else ""
            picture = DOCS / f"{name.replace('-', '_')}{narrow}.png"
            screenshot(folder / "page.html", width, height, dark, picture)


if __name__ == "__main__":
    main()
