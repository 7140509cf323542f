"""Scores a checkpoint on held-out data: `python -m experiments.evaluate --checkpoint=DIR`."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
from absl import flags

from experiments.cli import program

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "A checkpoint, or a folder of them, such as a run's (the newest is taken)."
)
_OUTPUT = flags.DEFINE_string("output", None, "Also write the result to this JSON file.")


def main(_) -> int:
    from ddiloco.run.recipes import assembly_of
    from ddiloco.storage.checkpoints import CheckpointError, restore
    from ddiloco.telemetry.scalars import as_json
    from ddiloco.training import platform

    path = pathlib.Path(program.required(_CHECKPOINT))
    platform.prepare()
    try:
        checkpoint = restore(path)
    except CheckpointError as error:
        raise program.UsageError(f"checkpoint: {error}") from error
    e = checkpoint.experiment
    e = dataclasses.replace(e, eval=dataclasses.replace(e.eval, every=0))  # a run may have it off
    output = program.writable_file(_OUTPUT)
    assembly = assembly_of(e)
    found = assembly.scorer(assembly.mesh_on(jax.devices()))(checkpoint.params)
    if found is None:
        raise program.UsageError("checkpoint: is of a loop that has no `evaluate`, so there is no score")
    before = checkpoint.eval_loss
    then = "not scored in training" if before is None else f"at the end of training {before:.6f}"
    print(f"step {checkpoint.step}: {found.loss:.6f} nats/token ({then})")
    for name, value in found.statistics.items():
        print(f"  {name} {value:.6g}")
    if output:
        result = {
            "step": checkpoint.step,
            "eval_loss": found.loss,
            **{f"eval_{name}": value for name, value in found.statistics.items()},
            "eval_loss_in_training": checkpoint.eval_loss,
        }
        output.write_text(json.dumps(as_json(result), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
