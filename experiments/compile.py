"""Compiles a run for TPUs that need not be there: `python -m experiments.compile --topology=v5p:4x4x4`.

Needs libtpu (`pip install 'ddiloco[tpu_compiler]'`), but no TPU. The slice is that of one learner, which may
have several (`--slices=2`).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

from absl import flags

from experiments.cli import program

_CONFIG = program.define_config("configs/dense.py")
_TOPOLOGY = flags.DEFINE_string(
    "topology", "v5p:2x2x2", "The slice of one learner, such as v5e:2x4; here: the devices of this machine."
)
_SLICES = flags.DEFINE_integer(
    "slices", None, "Slices of one learner. Default: config.mesh.slice.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "Also write the figures to this JSON file.")
_SAVE = flags.DEFINE_string("save", None, "Keep the compiled step in this file, for train.executable.")
_TABLE = flags.DEFINE_string(
    "table", None, "Compile presets of all sizes for slices of each kind, and write their table to this file."
)


def main(_) -> int:
    from experiments.studies.compiling import report
    from experiments.studies.compiling.topology import slice_of

    if _TABLE.value:
        program.refuse_flags(
            ["config", "topology", "slices", "output", "save"],
            "has no use with --table, which says all itself",
        )
        for argument in program.config_arguments()[1:]:
            raise program.UsageError(f"{argument.strip('-')}: has no use with --table, which says all itself")
        return _make_table(pathlib.Path(_TABLE.value))
    experiment, output, save = (
        _CONFIG.experiment(),
        program.writable_file(_OUTPUT),
        program.writable_file(_SAVE),
    )
    slices = _SLICES.value or experiment.mesh.slice
    experiment = dataclasses.replace(experiment, mesh=dataclasses.replace(experiment.mesh, slice=slices))
    compilation = report.Compilation(experiment, slice_of(_TOPOLOGY.value, slices))
    programs = list(compilation.programs(program.print_err))
    found = report.report(program.chosen_config(), _TOPOLOGY.value, compilation, programs)
    print(report.text(found))
    if save:
        compilation.save(save)
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _make_table(path: pathlib.Path) -> int:
    """Writes the table; the figures of each row are kept in build/compile, and not compiled again."""
    from experiments.studies.compiling import table

    program.writable_file(_TABLE)
    found = table.compile_all(program.ensure_folder("table", "build/compile"), program.print_err)
    with program.os_errors_as_usage("table", path):
        text = path.read_text() if path.exists() else ""
        head, _, _ = text.partition("| preset |")
        path.write_text(head + table.table(found) + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
