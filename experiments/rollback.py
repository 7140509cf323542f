"""Sets a stopped run of processes back: `python -m experiments.rollback --workdir=DIR --to=STEP`.

The syncer keeps the last versions of each fragment (config.recovery.keep_versions). Each becomes the newest
that was merged at global step STEP or before; later files move to DIR/previous/N. Then start the
syncer again with --resume, and the learners as before.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import program

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_TO = flags.DEFINE_integer("to", None, "Global step to go back to.", lower_bound=0)


def main(_) -> int:
    from ddiloco.run.rollback import roll_back

    workdir, step = pathlib.Path(program.required(_WORKDIR)), program.required(_TO)
    with program.os_errors_as_usage("workdir", workdir):
        done = roll_back(workdir, step)
    print(f"back at step {done.step}, versions {', '.join(map(str, done.versions))}")
    print(f"later files are in {done.previous}")
    return 0


if __name__ == "__main__":
    program.run(main)
