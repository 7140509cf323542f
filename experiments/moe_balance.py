"""What merging does to the balance of experts: `python -m experiments.moe_balance --output=FOLDER`.

Trains under the virtual driver and scores, at every evaluation and on the same held-out rows, the global
model, each learner's own parameters, and the plain average of these. Writes `balance.json` and `balance.png`.
"""

from __future__ import annotations

import json

from absl import flags

from experiments.front import cli, ending

_CONFIG = cli.define_config("configs/moe.py")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the figure and its numbers.")


def main(_) -> int:
    from ddiloco.settings.experiment import parse
    from ddiloco.training import platform
    from experiments.studies import expert_balance

    if not _OUTPUT.value:
        raise cli.UsageError("output: is missing; give --output=FOLDER")
    config = _CONFIG.value
    config.driver = "virtual"
    experiment = parse(config)
    if not hasattr(experiment.model, "num_experts"):
        raise cli.UsageError("config.model.name: must be of a model with experts")
    platform.prepare()
    folder = cli.made_folder("output", _OUTPUT.value)
    stop, _ = ending.stop_on_signals()
    points = expert_balance.scored_run(experiment, stop)
    (folder / "balance.json").write_text(json.dumps(points, indent=1) + "\n")
    expert_balance.draw(folder / "balance.png", points)
    print(folder / "balance.png")
    return 0


if __name__ == "__main__":
    cli.run(main)
