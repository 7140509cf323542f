"""How far learners' outer gradients agree: `python -m experiments.agreement --runs=FOLDER`.

Reads the cosines that all runs below the folder have recorded of their rounds, such as those of a sweep or of
a comparison: between different learners, and to what they are merged to; over the run, and by kind of tensor.
Writes agreement.json, agreement.md and agreement.png, into that folder unless there is an --output.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import program

_RUNS = flags.DEFINE_string("runs", None, "Folder with runs below it.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of table and figure. Default: that of the runs.")


def main(_) -> int:
    from experiments.studies import agreement, figures, results

    runs = program.required(_RUNS)
    frame = agreement.measured(pathlib.Path(runs))
    if frame.empty:
        raise program.UsageError(f"runs: {runs}: no run below it has a round of several learners")
    stem = program.ensure_folder("output", _OUTPUT.value or runs) / "agreement"
    means = frame.groupby(["label", "kind"], sort=False)[["cosine", "to_merged"]].mean().reset_index()
    results.write(stem, means.to_dict("records"), agreement.table(frame))
    figures.draw_agreement(stem.with_suffix(".png"), frame)
    results.show(stem)
    return 0


if __name__ == "__main__":
    program.run(main)
