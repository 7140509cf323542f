"""The evaluator of a run of processes: `python -m experiments.evaluator --config=FILE --workdir=DIR`.

It needs the syncer's workdir, the same settings, and devices that no learner uses; without it, the syncer
scores the global model itself, once, at the end.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

from experiments.front import cli, ending, roles

_CONFIG = cli.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, which its syncer was given.")


def main(_) -> int:
    from ddiloco.remote.evaluator import EvaluatorProcess
    from ddiloco.run.recipes import assembly_of
    from ddiloco.settings.experiment import parse, with_steps_of_tokens
    from ddiloco.training import platform

    if not _WORKDIR.value:
        raise cli.UsageError("workdir: is missing; give --workdir=DIR, the syncer's")
    experiment = dataclasses.replace(parse(_CONFIG.value), driver="remote")
    platform.prepare()
    roles.name_process("evaluator")
    stop, received = ending.stop_on_signals()

    def note(line: str) -> None:
        cli.tell(f"evaluator: {line}")

    workdir = pathlib.Path(_WORKDIR.value)
    with cli.reaching("workdir", workdir):
        EvaluatorProcess(assembly_of(with_steps_of_tokens(experiment)), workdir, note).run(stop)
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    cli.run(main)
