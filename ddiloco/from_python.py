"""A run from Python, as in a notebook: a loop of your own, trained by M learners and a syncer."""

from __future__ import annotations

import gc
import importlib.util
import json
import pathlib
import sys
import tempfile
import threading
from typing import Any, NamedTuple

from ddiloco.launch.supervisor import run_all
from ddiloco.run.job import run_job
from ddiloco.run.recipes import LoopRecipe, load_factory
from ddiloco.run.rollback import going_on
from ddiloco.settings import loop
from ddiloco.settings.experiment import Experiment, parse, to_json
from ddiloco.storage import checkpoints
from ddiloco.training import platform
from ddiloco.training.loop import MakeLoop


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
      params: the global model, in the tree that the loop's `params` gives.
      summary: what `summary.json` holds.
    """

    params: Any
    summary: dict[str, Any]


class RunError(Exception):
    """The run failed; the message says why."""


def train(
    make_loop: MakeLoop | str,
    workdir: str | pathlib.Path,
    *,
    learners: int = 4,
    steps: int = 480,
    driver: str = "local",
    settings: dict[str, Any] | None = None,
    stop: threading.Event | None = None,
    resume: bool | int = False,
    **config: Any,
) -> Trained:
    """Trains a loop of your own with M learners and a syncer, and returns when the run has ended.

    Args:
      make_loop: `(place, **settings) -> Loop`, or its name, `module:function` or `file.py:function`.
      workdir: the folder for all files of the run.
      learners: M.
      steps: T, the global steps.
      driver: "local": threads; "remote": processes of this machine; "virtual": a simulated clock.
      settings: keyword arguments of `make_loop`; JSON values.
      stop: ends the run early when it is set.
      resume: continue the run in `workdir`, or its snapshot of this number; False: begin anew, and move an
        earlier run there aside.
      config: other settings of a run, a dict for each group: `sync={"num_fragments": 2}`, `seed=1`. They take
        precedence over `learners` and `steps`.

    Raises:
      ConfigError, DataError: found before anything was trained; the message says what was expected.
      RunError: the run failed.
    """
    name = make_loop if isinstance(make_loop, str) else _name(make_loop)
    make = load_factory(name) if isinstance(make_loop, str) else make_loop
    values = {**config, "driver": driver, "model": {"name": loop.NAME, "factory": name, "settings": settings}}
    sync = values.get("sync", {})
    # As in the presets: no work is lost.
    rebase = values.get("algorithm", "decoupled") == "decoupled" and not sync.get("mixing")
    values["sync"] = {"rebase": rebase, "num_learners": learners, **sync}
    values["train"] = {"steps": steps, **values.get("train", {})}
    experiment = parse(values)
    workdir, stop = pathlib.Path(workdir), stop or threading.Event()
    resume = bool(going_on(resume, workdir, experiment, print))
    platform.prepare(cache=False)
    if driver == "remote":
        load_factory(name)  # as its processes will
        _run_processes(experiment, workdir, stop, resume)
    else:
        failure = run_job(experiment, workdir, stop, resume=resume, make_loop=make).failure
        gc.collect()  # roles refer to each other: their arrays would stay on the devices during the next run
        if failure is not None:
            raise RunError(failure)
    params = checkpoints.restore(workdir / "checkpoints").params
    summary = json.loads((workdir / "summary.json").read_text())
    return Trained(LoopRecipe(experiment, make).tree(params), summary)


def _run_processes(
    experiment: Experiment, workdir: pathlib.Path, stop: threading.Event, resume: bool
) -> None:
    config = importlib.util.find_spec("experiments.cli.saved").origin
    with tempfile.TemporaryDirectory(prefix="ddiloco-") as folder:
        file = pathlib.Path(folder) / "config.json"
        file.write_text(json.dumps(to_json(experiment)))
        lines: list[str] = []
        code = run_all(experiment, [f"--config={config}:{file}"], workdir, stop, lines.append, resume=resume)
    if code:
        raise RunError(f"the processes ended with exit code {code}: {'; '.join(lines) or 'see above'}")


def _name(make_loop: MakeLoop) -> str:
    """The name by which another process can import the function, if it is defined at a module's top level."""
    module = make_loop.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    if module == "__main__" and file is not None:
        module = str(pathlib.Path(file).resolve())
    return f"{module}:{make_loop.__qualname__}"
