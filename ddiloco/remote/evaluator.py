"""The evaluator as a process: reads the syncer's durable fragments, and scores the global model.

It uses devices of its own and only reads: no process waits for it, and a run continues without it.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ddiloco.outer.fragments import assemble
from ddiloco.outer.stacks import array_shape
from ddiloco.storage import run_mark
from ddiloco.storage.durable import FOLDER, DurableState, DurableStateError
from ddiloco.storage.score_files import Scored, Scores, Wanted
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.records import Evaluated
from ddiloco.telemetry.run_files import is_over
from ddiloco.workers.assembly import Assembly, Scorer
from ddiloco.workers.evaluator import Evaluations
from ddiloco.workers.exchange import Pieces
from ddiloco.workers.transfer import FragmentTransfer

_POLL = 0.2  # seconds
_UNTOLD_WAIT = 20.0  # seconds that a run may take to begin without a word
_TRIES = 450  # to see the fragments that the syncer has left: NFS may show those of a minute ago
_MAX_WAIT = 600.0  # seconds for another run to begin, where an evaluator begins after the end of one


class FollowedModel:
    """The global model of the durable fragments; the host holds one changed fragment at a time.

    It is sharded over a mesh, except for a user's loop, which scores on the host.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh) -> None:
        self._layout = assembly.layout
        shardings = assembly.recipe.global_shardings(mesh)
        self._transfer = None if shardings is None else FragmentTransfer(self._layout, dict(shardings))
        self._sharded: dict[str, jax.Array] = {}
        for name, sharding in (shardings or {}).items():
            shape = array_shape(name, dict(self._layout.shapes))
            self._sharded[name] = jnp.zeros(shape, jnp.float32, device=sharding)
        self._on_host: list[Pieces] = [()] * self._layout.num_fragments
        self.forget()

    def forget(self) -> None:
        """The fragments to follow are those of another run."""
        self._seen: list[tuple[int, int] | None] = [None] * self._layout.num_fragments
        self._versions, self._steps = [0] * len(self._seen), [0] * len(self._seen)

    @property
    def step(self) -> int:
        """The global step of the newest round in it."""
        return max(self._steps)

    @property
    def versions(self) -> tuple[int, ...]:
        """By fragment."""
        return tuple(self._versions)

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters by name."""
        return assemble(self._layout, self._on_host) if self._transfer is None else self._sharded

    def refresh(self, durable: DurableState) -> None:
        """Loads the fragments that have changed; raises DurableStateError and OSError."""
        for p in range(self._layout.num_fragments):
            at = durable.changed_at(p)
            if at == self._seen[p]:
                continue
            state, self._steps[p], _ = durable.fragment(p)
            if self._transfer is None:
                self._on_host[p] = state.pieces
            else:
                self._sharded = self._transfer.apply(p, self._sharded, state.pieces, 0.0)
            self._seen[p], self._versions[p] = at, state.version


class EvaluatorProcess:
    """Scores the global model when it is due, and as its syncer leaves it at the end."""

    def __init__(self, assembly: Assembly, workdir: pathlib.Path, note: Callable[[str], None]) -> None:
        """`note` takes a line on each evaluation that fails, and on a run that is waited for."""
        self._assembly, self._experiment = assembly, assembly.experiment
        self._workdir, self._note = workdir, note
        self._scores = Scores(workdir)
        self._model: FollowedModel | None = None
        self._scorer: Scorer | None = None
        self._run = ""
        self._evaluations: Evaluations | None = None
        self._answered: set[str] = set()
        self._tries = 0
        self._deadline = time.monotonic() + _MAX_WAIT
        self._over, self._look_at = False, 0.0  # by the summary; when to look again anyhow

    def run(self, stop: threading.Event) -> None:
        """Follows the run in the workdir to its end, or until `stop` is set.

        Raises:
          ConfigError, DataError: the global model cannot be scored with these settings.
        """
        self._assembly.check_evaluator()
        waits_until = time.monotonic() + _UNTOLD_WAIT
        while not stop.is_set():
            with self._scores.attending() as alone:
                while alone and not stop.is_set():
                    if time.monotonic() > waits_until:
                        waits_until = math.inf
                        if not (self._workdir / FOLDER).exists():  # as in another workdir than the syncer's
                            self._note(f"waits for a run in {self._workdir}")
                    # Files of an earlier run, of one that just begins, or in the middle of a rollback.
                    with contextlib.suppress(DurableStateError, run_mark.RunMarkError, OSError):
                        if self._look():
                            return
                    stop.wait(_POLL)
            stop.wait(_POLL)

    def _look(self) -> bool:
        """Scores if due; returns whether the run is over.

        A run that was over before this process requested a score may be an earlier one.
        """
        wanted = self._scores.wanted()
        if self._is_over(wanted):
            return bool(self._answered) or time.monotonic() > self._deadline
        mark = run_mark.begun(self._workdir / FOLDER)
        if mark is None:
            return False
        durable = DurableState(
            self._workdir / FOLDER, self._assembly.layout, lambda record: None, threading.Event(), mark.run
        )
        if wanted is not None and wanted.run == mark.run and wanted.ask not in self._answered:
            self._answer(durable, wanted)
        elif self._experiment.eval.every is not None:
            self._refresh(durable)
            self._score_if_due()
        return False

    def _is_over(self, wanted: Wanted | None) -> bool:
        """Reads the summary, which may be in a bucket, only after the last score of the present versions."""
        asked = wanted is not None and self._model is not None and wanted.versions == self._model.versions
        if self._over or asked or time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _MAX_WAIT
            self._over = is_over(self._workdir, self._experiment.train.steps)
        return self._over

    def _refresh(self, durable: DurableState) -> None:
        if self._model is None:
            mesh = self._assembly.mesh_on(jax.devices())
            self._model, self._scorer = FollowedModel(self._assembly, mesh), self._assembly.scorer(mesh)
        if durable.run != self._run:
            self._model.forget()
            self._run, self._evaluations = durable.run, None
        before = self._model.step
        self._model.refresh(durable)
        if self._model.step < before:  # the run was rolled back
            self._evaluations = None

    def _score_if_due(self) -> None:
        step, e = self._model.step, self._experiment
        due = self._evaluations is not None and self._evaluations.due(step)
        if self._evaluations is None:
            self._evaluations = Evaluations(self._scorer, e.eval.every, self._evaluated, since=step)
            due = step == 0
        if due and step < e.train.steps:  # the last one is scored at the end of the run
            try:
                self._evaluations.evaluate(step, self._tokens_so_far() if step else 0, self._model.params)
            except Exception as error:  # the run continues, and the next may succeed
                self._note(f"at step {step}: {type(error).__name__}: {error}")

    def _answer(self, durable: DurableState, wanted: Wanted) -> None:
        """Scores and samples the syncer's final fragments, once they exist; or reports the problem."""
        said: dict[str, Any] = {}
        try:
            self._refresh(durable)
            if self._model.versions != wanted.versions:
                raise DurableStateError(f"the disk has {self._model.versions}, not {wanted.versions}")
            found = self._scorer(self._model.params)
            if found is not None:
                said = {"loss": found.loss, "statistics": found.statistics}
            if self._assembly.recipe.samples:
                said["sample"] = self._assembly.recipe.sample(self._model.params)
        except Exception as error:
            self._tries += 1  # another machine may see late what is on the disk
            if isinstance(error, DurableStateError | OSError) and self._tries < _TRIES:
                return
            said["problem"] = f"at step {wanted.step}: {type(error).__name__}: {error}".splitlines()[0]
        self._scores.add(
            Scored(wanted.run, wanted.step, wanted.tokens, time.time(), answers=wanted.ask, **said)
        )
        self._answered.add(wanted.ask)
        self._tries = 0

    def _evaluated(self, record: Evaluated) -> None:
        self._scores.add(
            Scored(self._run, record.step, record.tokens, record.time, record.loss, record.statistics)
        )

    def _tokens_so_far(self) -> int:
        """Tokens as last written by the syncer's process, at most some seconds ago."""
        return sum(read_json(self._workdir / "summary.json").get("tokens", {}).values())
