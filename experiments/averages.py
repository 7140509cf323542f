"""Averages of parameters beside the global model: `python -m experiments.averages --output=FOLDER`.

Trains under the virtual driver and scores, at every evaluation and on the same held-out rows, the global
model, its averages over the last rounds of each fragment, each learner's own parameters, and the plain
average of these; at the end also the model without the rounds of the last step; with experts, how evenly
these are used, too. Of data-parallel, which has one model, the averages of that over as many steps as
learners take in those rounds. --seeds=0,1,2 trains once for each.

Writes `averages.json` and `averages.png`, and prints the losses at the end beside the global model's.
"""

from __future__ import annotations

import json

from absl import flags

from experiments.cli import exit_handling, program

_CONFIG = program.define_config("configs/dense.py")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the figure and its numbers.")
_SEEDS = flags.DEFINE_list("seeds", [], "Seeds, one run each. Default: the config's.")


def main(_) -> int:
    from ddiloco.training import platform
    from experiments.studies import averages, runs

    output = program.required(_OUTPUT)
    if _CONFIG.value.eval.every is None:
        raise program.UsageError("config.eval.every: is None, but runs whose averages are wanted are scored")
    if _SEEDS.value and program.has_override("seed"):
        raise program.UsageError("config.seed: has no use with --seeds, which says which there are")
    seeds = runs.parse_seeds(_SEEDS.value) if _SEEDS.value else [_CONFIG.value.seed]
    planned = [_CONFIG.experiment(driver="virtual", seed=seed) for seed in seeds]
    platform.prepare()
    folder = program.ensure_folder("output", output)
    stop, received = exit_handling.stop_on_signals(saving=f"saving the scores so far in {folder}")
    points = []
    for experiment in planned:
        points += averages.scored_run(experiment, stop)
        (folder / "averages.json").write_text(json.dumps(points, indent=1) + "\n")
        if stop.is_set():
            break
    averages.draw(folder / "averages.png", points)
    print(averages.table(points))
    print(folder / "averages.png")
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    program.run(main)
