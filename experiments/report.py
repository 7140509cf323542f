"""A run as one HTML file, to send it to a colleague: `python -m experiments.report --workdir=DIR`."""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import program
from experiments.cli.workdirs import runs_in

_WORKDIRS = flags.DEFINE_multi_string("workdir", [], "Folder of the run.")
_COMPARE = flags.DEFINE_multi_string("compare", [], "Folder of another run, to stand beside it.")
_OUTPUT = flags.DEFINE_string("output", None, "The file. Default: report.html in the run's folder.")


def main(_) -> int:
    from ddiloco.dashboard.sheet import document
    from ddiloco.dashboard.view import read_views
    from ddiloco.telemetry.files import replacing

    workdirs = runs_in(map(pathlib.Path, [*program.required(_WORKDIRS), *_COMPARE.value]))
    output = pathlib.Path(_OUTPUT.value or workdirs[0] / "report.html")
    with program.os_errors_as_usage("output", output), replacing(output) as new:
        new.write_text(document(read_views(workdirs), inline=True))
    print(output)
    return 0


if __name__ == "__main__":
    program.run(main)
