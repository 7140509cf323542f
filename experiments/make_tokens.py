"""Makes a token for each learner: `python -m experiments.make_tokens --learners=8 --output=DIR`.

The syncer gets `--token_file=DIR/tokens`, and learner m `--token_file=DIR/learner-m`: its process can then
speak for no other. DIR/operator is for `experiments.control`, which manages the run. A machine trusted with
all learners may have DIR/tokens for those too.
"""

from __future__ import annotations

import os
import pathlib
import secrets

from absl import flags

from experiments.cli import program

_LEARNERS = flags.DEFINE_integer("learners", None, "How many learners the run has.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the files; it must not be there.")


def main(_) -> int:
    folder, learners = (
        program.writable_folder("output", program.required(_OUTPUT)),
        program.required(_LEARNERS),
    )
    tokens = {m: secrets.token_hex(24) for m in range(learners)}
    with program.os_errors_as_usage("output", folder):
        folder.mkdir(mode=0o700, parents=True)
        operator = secrets.token_hex(24)
        lines = [f"{m} {token}\n" for m, token in tokens.items()]
        _write(folder / "tokens", "".join([*lines, f"operator {operator}\n"]))
        _write(folder / "operator", f"{operator}\n")
        for m, token in tokens.items():
            _write(folder / f"learner-{m}", f"{token}\n")
    print(f"{folder}/tokens is the syncer's, {folder}/learner-NUMBER each learner's own")
    return 0


def _write(path: pathlib.Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


if __name__ == "__main__":
    program.run(main)
