"""What merging does to the balance of experts: `python -m experiments.moe_balance --output=FOLDER`.

Trains under the virtual driver and scores, at every evaluation and on the same held-out rows, the global
model, each learner's own parameters, and the plain average of these. Writes `balance.json` and `balance.png`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.front import cli, ending

if TYPE_CHECKING:
    from ddiloco.training.evaluation import Score

_CONFIG = cli.define_config("configs/moe.py")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the figure and its numbers.")

PANELS = {
    "loss": "held-out loss, nats/token",
    "max_load": "busiest expert of any layer, over an even share",
    "router_entropy": "entropy of the router, nats",
    "dropped_share": "share of choices dropped",
}
GLOBAL, AVERAGE = "global model", "average of the learners"


def main(_) -> int:
    import numpy as np

    from ddiloco.observe.records import Evaluated
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import parse
    from ddiloco.training import platform
    from ddiloco.virtual.run import VirtualRun

    if not _OUTPUT.value:
        raise cli.UsageError("output: is missing; give --output=FOLDER")
    config = _CONFIG.value
    config.driver = "virtual"
    experiment = parse(config)
    if not hasattr(experiment.model, "num_experts"):
        raise cli.UsageError("config.model.name: must be of a model with experts")
    platform.prepare()
    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    points: list[dict[str, Any]] = []

    class ScoredRun(VirtualRun):
        """A virtual run that scores its learners beside the global model."""

        def evaluate(self, step: int) -> float:
            loss = super().evaluate(step)
            if step:
                owned = {m: arrays.params for m, arrays in sorted(self.learners.items())}
                found = {f"learner {m}": self.score(params) for m, params in owned.items()}
                mean = {
                    name: np.mean([np.asarray(params[name]) for params in owned.values()], axis=0)
                    for name in owned[0]
                }
                points.extend(point(step, name, score) for name, score in found.items())
                points.append(point(step, AVERAGE, self.score(mean)))
            return loss

    def record(entry: Any) -> None:
        if isinstance(entry, Evaluated):
            points.append(point(entry.step, GLOBAL, entry))
            print(f"step {entry.step}: held-out loss {entry.loss:.4f}", flush=True)

    stop, _ = ending.stop_on_signals()
    ScoredRun(assembly_of(experiment), record, stop).run()
    (folder / "balance.json").write_text(json.dumps(points, indent=1) + "\n")
    draw(folder / "balance.png", points)
    print(folder / "balance.png")
    return 0


def point(step: int, name: str, score: Score) -> dict[str, Any]:
    """One parameters' score at a step."""
    return {"step": step, "name": name, "loss": score.loss, **score.statistics}


def draw(path: pathlib.Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Writes the figure: a panel for each entry of `PANELS`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), dpi=120, layout="constrained")
    grey = {"color": "0.6", "lw": 1}
    styles = {GLOBAL: {"lw": 2.2, "label": GLOBAL}, AVERAGE: {"lw": 2.2, "ls": "--", "label": AVERAGE}}
    styles["learner 0"] = {**grey, "label": "learners"}
    names = dict.fromkeys(entry["name"] for entry in points)
    for axes, (metric, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in names:
            # The initial loss would hide all that follows.
            curve = [
                (entry["step"], entry[metric])
                for entry in points
                if entry["name"] == name and (entry["step"] or metric != "loss")
            ]
            axes.plot(*zip(*curve, strict=True), **styles.get(name, grey))
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if metric == "loss":
            axes.legend()
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    cli.run(main)
