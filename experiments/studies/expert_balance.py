"""The balance of experts of the global model, of each learner, and of their average, as training goes on."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.observe.figures import dress, figure_at
from ddiloco.observe.records import Evaluated
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import Experiment
from ddiloco.training.evaluation import Score
from ddiloco.virtual.run import VirtualRun

PANELS = {
    "loss": "held-out loss, nats/token",
    "max_load": "busiest expert of any layer, over an even share",
    "router_entropy": "entropy of the router, nats",
    "dropped_share": "share of choices dropped",
}
GLOBAL, AVERAGE = "global model", "average of the learners"


def scored_run(experiment: Experiment, stop: threading.Event) -> list[dict[str, Any]]:
    """Trains in virtual time; the scores of all parameters at every evaluation, on the same held-out rows."""
    points: list[dict[str, Any]] = []

    class ScoredRun(VirtualRun):
        """A virtual run that scores its learners beside the global model."""

        def evaluate(self, step: int) -> float:
            loss = super().evaluate(step)
            alive = {f"learner {m}": own.params for m, own in sorted(self.learners.items()) if own.params}
            if step and alive:
                average = {
                    name: np.mean([np.asarray(params[name]) for params in alive.values()], axis=0)
                    for name in next(iter(alive.values()))
                }
                owned = {**alive, AVERAGE: average}
                points.extend(_point(step, who, self.score(params)) for who, params in owned.items())
            return loss

    def record(entry: Any) -> None:
        if isinstance(entry, Evaluated):
            points.append(_point(entry.step, GLOBAL, entry))
            print(f"step {entry.step}: held-out loss {entry.loss:.4f}", flush=True)

    ScoredRun(assembly_of(experiment), record, stop).run()
    return points


def draw(path: pathlib.Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Writes the figure: a panel for each entry of `PANELS`."""
    grey = {"color": "0.6", "lw": 1}
    styles = {GLOBAL: {"lw": 2.2, "label": GLOBAL}, AVERAGE: {"lw": 2.2, "ls": "--", "label": AVERAGE}}
    styles["learner 0"] = {**grey, "label": "learners"}
    with figure_at(path, 13, 8, dpi=120) as figure:
        for axes, (metric, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
            for name in dict.fromkeys(point["name"] for point in points):
                # The initial loss would hide all that follows.
                own = [p for p in points if p["name"] == name and (p["step"] or metric != "loss")]
                axes.plot([p["step"] for p in own], [p[metric] for p in own], **styles.get(name, grey))
            axes.set_xlabel("step")
            axes.set_title(title, fontsize=10)
            dress(axes)
            if metric == "loss":
                axes.legend()


def _point(step: int, name: str, score: Score) -> dict[str, Any]:
    """One parameters' score at a step."""
    return {"step": step, "name": name, "loss": score.loss, **score.statistics}
