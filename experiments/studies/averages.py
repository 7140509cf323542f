"""Scores of the global model, of its averages over rounds, of each learner, and of the learners' average.

Of a baseline, which has one model, those of it and of averages over as many steps.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from ddiloco.baselines.wall import JobArrays
from ddiloco.outer.fragments import assemble
from ddiloco.outer.global_model import GlobalModel
from ddiloco.run.job import with_steps
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import BASELINES, Experiment
from ddiloco.telemetry.records import Evaluated
from ddiloco.training.evaluation import Score
from ddiloco.virtual.run import VirtualRun
from experiments.studies import comparison, figures, results

PANELS = {  # those after the first are of models with experts
    "loss": "held-out loss, nats/token",
    "max_load": "busiest expert of any layer, over an even share",
    "router_entropy": "entropy of the router, nats",
    "dropped_share": "share of choices dropped",
}
GLOBAL, AVERAGE, LEARNER = "global model", "average of the learners", "learner"
WITHOUT_LAST = "without the last rounds"  # those of the last step, at the end
AVERAGES = {f"average of {n} rounds": n for n in (2, 4, 10)}  # how far back they reach


class Mean:
    """The mean of all added arrays, newer ones with more weight: weights fall by 1 - 1/length, one by one."""

    def __init__(self, length: int, first: Any) -> None:
        """`first`: the value until arrays like these are added; it has no weight then."""
        average = optax.ema(1 - 1 / length)
        self._update, self._state = jax.jit(average.update), average.init(first)
        self.value = first

    def take(self, arrays: Any) -> None:
        """Takes arrays in."""
        self.value, self._state = self._update(arrays, self._state)


class RoundAverage:
    """The means of the versions of each fragment."""

    def __init__(self, model: GlobalModel, rounds: int) -> None:
        """Begins with the fragments as they are, which no longer count once there is a newer version."""
        self._model, self._seen = model, dict.fromkeys(model.fragments, 0)
        self._means = {p: Mean(rounds, model.fragment(p)[1]) for p in model.fragments}

    def look(self) -> None:
        """Takes in the versions that are new; to be called after every merge."""
        for p, mean in self._means.items():
            version, pieces = self._model.fragment(p)
            if version > self._seen[p]:
                self._seen[p] = version
                mean.take(pieces)

    def parameters(self) -> dict[str, np.ndarray]:
        """The average's tensors by name."""
        means = [[np.asarray(x) for x in mean.value] for mean in self._means.values()]
        return assemble(self._model.layout, means)


class ScoredRun(VirtualRun):
    """A virtual run that scores more than the global model; `points` has one entry for each score."""

    def __init__(self, experiment: Experiment, stop: threading.Event) -> None:
        self.points: list[dict[str, Any]] = []
        self._seed, self._averages = experiment.seed, {}
        self._earlier: dict[str, np.ndarray] = {}  # the global model before the last step's rounds
        super().__init__(assembly_of(experiment), self._note, stop)
        model = self._arrays.model
        self._averages = {name: RoundAverage(model, n) for name, n in AVERAGES.items()}

    def evaluate(self, step: int) -> float:
        loss = super().evaluate(step)
        found: dict[str, Mapping[str, Any]] = {
            name: average.parameters() for name, average in self._averages.items() if step
        }
        alive = {f"{LEARNER} {m}": own.params for m, own in sorted(self.learners.items()) if own.params}
        if step and alive:
            names = next(iter(alive.values()))
            found[AVERAGE] = {n: np.mean([np.asarray(own[n]) for own in alive.values()], 0) for n in names}
        if step == self._experiment.train.steps and self._earlier:
            found[WITHOUT_LAST] = self._earlier
        for name, params in {**found, **alive}.items() if step else ():
            self._add(step, name, self.score(params))
        return loss

    def _merged(self, step: int) -> None:
        for average in self._averages.values():
            average.look()
        if step < self._experiment.train.steps:
            self._earlier = self._arrays.model.parameters()
        super()._merged(step)

    def _note(self, record: Any) -> None:
        if isinstance(record, Evaluated):
            self._add(record.step, GLOBAL, record)

    def _add(self, step: int, name: str, score: Score | Evaluated) -> None:
        self.points.append(_point(self._seed, step, name, score))


def scored_run(experiment: Experiment, stop: threading.Event) -> list[dict[str, Any]]:
    """Trains; the scores of all parameters at every evaluation, on the same held-out rows.

    Learners train in virtual time. A baseline's job takes its steps as they come; its averages reach back as
    many steps as learners take in those rounds.
    """
    experiment = with_steps(experiment, lambda: assembly_of(experiment))
    if experiment.algorithm in BASELINES:
        return _scored_job(experiment, stop)
    run = ScoredRun(experiment, stop)
    run.run()
    return run.points


def _scored_job(experiment: Experiment, stop: threading.Event) -> list[dict[str, Any]]:
    arrays, every, last = JobArrays(assembly_of(experiment)), experiment.eval.every, experiment.train.steps
    arrays.begin()
    # Copies, since the next step takes the memory of the parameters.
    first, interval = jax.tree.map(jnp.copy, arrays.params), experiment.sync.interval
    means = {name: Mean(rounds * interval, first) for name, rounds in AVERAGES.items()}
    score = arrays.scorer()
    points = [_point(experiment.seed, 0, GLOBAL, score(arrays.params))]
    for step in range(1, last + 1):
        if stop.is_set():
            break
        _, metrics = arrays.step(step - 1)
        jax.block_until_ready(metrics)
        for mean in means.values():
            mean.take(arrays.params)
        if step == last or (every and step % every == 0):
            scored = {GLOBAL: arrays.params, **{name: mean.value for name, mean in means.items()}}
            points += [_point(experiment.seed, step, name, score(p)) for name, p in scored.items()]
    return points


def _point(seed: int, step: int, name: str, score: Score | Evaluated) -> dict[str, Any]:
    if name == GLOBAL:
        print(f"seed {seed}, step {step}: held-out loss {score.loss:.4f}", flush=True)
    return {"seed": seed, "step": step, "name": name, "loss": score.loss, **score.statistics}


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Losses at the last evaluation, and how far above the global model's of the same seed; in Markdown."""
    last = {point["seed"]: point["step"] for point in points}
    rows = [
        {"label": p["name"], "against": GLOBAL, "seed": p["seed"], "finished": True, "eval_loss": p["loss"]}
        for p in points
        if p["step"] == last[p["seed"]]
    ]
    frame = results.completed(rows, comparison.held_against)
    return results.table(frame, ["label"], ("eval_loss", "gap"))


def draw(path: pathlib.Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Writes the figure of the first seed's run: a panel for each entry of `PANELS` that its model has."""
    frame = pd.DataFrame([point for point in points if point["seed"] == points[0]["seed"]])
    figures.draw_averages(path, frame, {name: title for name, title in PANELS.items() if name in frame})
