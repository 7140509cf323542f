"""Writes a run's model for transformers: `python -m experiments.export --workdir=DIR --to=FOLDER`.

FOLDER then has model.safetensors (several files and an index above 5 GB), config.json, and the tokenizer or
preprocessor where transformers has the same. `--config.init_from=FOLDER` begins a run from it. A setting of
the model that transformers has not can be another there: --config.model.capacity_factor=None.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

from experiments.cli import program

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_TO = flags.DEFINE_string("to", None, "Folder to write, new or empty.")
_OVERRIDES = program.take_overrides()


def main(_) -> int:
    from ddiloco.run.saved_model import saved_model
    from ddiloco.weights.export import export

    workdir, folder = (
        pathlib.Path(program.required(_WORKDIR)),
        program.writable_folder("to", program.required(_TO)),
    )
    with program.os_errors_as_usage("workdir", workdir):
        found = saved_model(workdir)
    experiment = dataclasses.replace(found.experiment, model=_changed(found.experiment.model))
    with program.os_errors_as_usage("to", folder):
        if folder.exists() and any(folder.iterdir()):
            raise program.UsageError(f"to: {folder}: is not empty")
        lines = export(experiment, found.params, folder)
    print(f"the global model of step {found.step} is in {folder}")
    for line in lines:
        print(line)
    return 0


def _changed(model):
    """The model's settings with those of the command line, which may not change its parameters."""
    from ddiloco.training.parameters import parameter_shapes

    changed = program.with_overrides(model, _OVERRIDES, "model")
    if _OVERRIDES and parameter_shapes(changed) != parameter_shapes(model):
        raise program.UsageError(f"config.{_OVERRIDES[0][0]}: the parameters would be others than the run's")
    return changed


if __name__ == "__main__":
    program.run(main)
