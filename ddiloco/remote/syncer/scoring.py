"""The scores of a run as its syncer's process has them: an evaluator's, of which it asks the last."""

from __future__ import annotations

import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.storage.score_files import Scored, Scores, Wanted
from ddiloco.telemetry import records
from ddiloco.telemetry.files import read_json
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.evaluator import Evaluations

_POLL = 0.2  # seconds
_SUMMARY_SECONDS = 10.0  # for the summary to be written
_LONGEST = 3600.0  # for the last score
_ABSENT = 5.0  # that an evaluator may be away, since it is restarted, before the syncer scores in its place


class LastScore(NamedTuple):
    """The score of the global model at the end of a run."""

    loss: float | None
    sample: str | None
    problem: str | None


class Scoring:
    """Used by the thread that runs the syncer's process."""

    def __init__(
        self,
        assembly: Assembly,
        workdir: pathlib.Path,
        run: str,
        record: Callable[[Any], None],
        stop: threading.Event,
    ) -> None:
        """What earlier processes of the run have taken from the evaluator is not recorded again.

        Once `stop` is set nobody waits for the evaluator.
        """
        self._assembly, self._run, self._record, self._stop = assembly, run, record, stop
        self._scores = Scores(workdir)
        self._summary = workdir / "summary.json"
        earlier = read_json(self._summary).get("eval_history", [])
        self._step = max((score["step"] for score in earlier), default=-1)
        self._ask: str | None = None  # for the last score

    def take(self) -> list[Scored]:
        """Records and returns the new scores of the run."""
        found = [scored for scored in self._scores.new() if scored.run == self._run]
        for scored in found:
            if scored.loss is not None and (scored.step > self._step or scored.answers == self._ask):
                self._step = scored.step
                values = scored.step, scored.tokens, scored.time, scored.loss, scored.statistics
                self._record(records.Evaluated(*values))
        return found

    def last(self, step: int, versions: tuple[int, ...], params: Mapping[str, np.ndarray]) -> LastScore:
        """Score and sample of the final fragments; made by this process if there is no evaluator."""
        recipe, off = self._assembly.recipe, self._assembly.experiment.eval.every is None
        if off and not recipe.samples:
            return LastScore(None, None, None)
        self.take()
        records.write_out(self._record, _SUMMARY_SECONDS, summary=True)
        tokens = sum(read_json(self._summary).get("tokens", {}).values())
        if self._scores.attended() is not None:
            self._ask = secrets.token_hex(8)
            wanted = Wanted(self._run, self._ask, step, tokens, versions)
            answer = None
            try:
                self._scores.want(wanted)
                answer = self._answer(wanted.ask)
            except OSError as error:  # a full disk, or another's folder
                problem = f"the evaluator cannot be asked: {records.reason(error)}"
                self._record(records.Alarm(problem, time.time()))
            if answer is not None:
                return LastScore(answer.loss, answer.sample, answer.problem)
        try:
            score = self._assembly.scorer(self._assembly.mesh_on(jax.devices()))
            loss = Evaluations(score, 0, self._record).evaluate(step, tokens, params)
            return LastScore(loss, recipe.sample(params) if recipe.samples else None, None)
        except Exception as error:  # the parameters are still to be saved
            return LastScore(None, None, f"at step {step}: {type(error).__name__}: {error}".splitlines()[0])

    def _answer(self, ask: str) -> Scored | None:
        """The evaluator's answer, for which it may take its time; None: it is not there."""
        begun = seen = time.monotonic()
        while time.monotonic() < min(seen + _ABSENT, begun + _LONGEST):
            for scored in self.take():
                if scored.answers == ask:
                    return scored
            if self._scores.attended():
                seen = time.monotonic()
            if self._stop.wait(_POLL):
                break
        return None
