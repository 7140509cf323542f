"""Exports of the global model for transformers during a run."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.run.saved_model import durable_model
from ddiloco.settings.experiment import Experiment
from ddiloco.storage import array_file, run_mark
from ddiloco.storage.durable import FOLDER as DURABLE
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.records import Alarm, Noted, reason
from ddiloco.telemetry.watches import TakeRecord, Watch
from ddiloco.weights.architectures import counterpart_of
from ddiloco.weights.export import export

FOLDER = "export"  # of a run, in its workdir
NEWEST = "newest.json"
KEPT = 3  # exports: loading one may take as long as the next two exports
_UNFINISHED = ".new"


class Exports(Watch):
    """Exports the durable fragments from a thread of its own, after the merge that makes it due.

    `export/<step>` appears complete, `export/newest.json` then names it: after a crash, both are as before
    or as after. An export that fails is an alarm; the next due merge tries again.
    """

    def __init__(self, experiment: Experiment, workdir: pathlib.Path, record: Callable[[Any], None]) -> None:
        """Continues after the exports in the workdir."""
        self._every, self._workdir, self._record = experiment.export.every, workdir, record
        self._folder = workdir / FOLDER
        self._next = self._after(int(read_json(self._folder / NEWEST).get("step", 0)))
        self._due, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for an export that is due or under way."""
        self._over.set()
        self._due.set()
        self._thread.join()

    def _after(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def _see(self, one: Any, record: TakeRecord) -> None:
        del record
        if isinstance(one, Noted) and one.name == "round" and one.values["step"] >= self._next:
            self._due.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._due.wait()
            self._due.clear()
            try:
                self._export()
            except Exception as error:  # the run goes on
                self._record(Alarm(f"an export failed: {reason(error)}", time.time()))

    def _export(self) -> None:
        mark = run_mark.begun(self._workdir / DURABLE)
        if mark is None:
            return
        found = durable_model(self._workdir, mark.run)
        if found.step < self._next:  # the run is over
            return
        new, made = self._folder / _UNFINISHED, self._folder / f"{found.step:08d}"
        for left in (new, made):  # of one that was killed
            if left.exists():
                shutil.rmtree(left)
        export(found.experiment, found.params, new)
        array_file.make_durable(new)
        new.rename(made)
        array_file.make_durable(self._folder)
        newest = {"step": found.step, "folder": made.name, "run": mark.run, "time": time.time()}
        array_file.replace(self._folder / NEWEST, [json.dumps(newest).encode() + b"\n"])
        self._next = self._after(found.step)
        for old in sorted(self._folder.glob("[0-9]*"))[:-KEPT]:
            with contextlib.suppress(OSError):  # the next export tries again
                shutil.rmtree(old)


def check_exports(experiment: Experiment) -> None:
    """Raises ConfigError if the settings ask for exports of a model that transformers does not have."""
    if experiment.export.every and (differences := counterpart_of(experiment.model).differences):
        raise ConfigError(f"config.export.every: the model cannot be exported: {'; '.join(differences)}")
