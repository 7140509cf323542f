"""Compares what a config file says: `python -m experiments.compare --config=FILE.py [--output=DIR]`.

The file has `get_comparison()`, a list with a dict a row:

  {"label": "decoupled, M=8", "preset": "decoupled", "paper": {"goodput": 0.84}, "any.field": value, ...}

`label` names the row; `preset` is what stands after the colon of experiments.train's --config; `paper` has
published figures, shown beside ours (which: `COLUMNS` in experiments/studies/results.py); `against` is the
label of the row whose loss the gap is above, seed by seed; all else are settings. What stands after the colon
of this program's --config is the function's argument. A setting given here, --config.any.field=value, holds
for every run and goes before a row's own. Without --output DIR is runs/compare-FILE, with the argument behind
it. COLUMNS, if the file has it, names the figures of the table in their order.

Each row is trained with each seed of --seeds=0,1,..., in a process of its own, in DIR/<label>/seed=<seed>;
--jobs=N at a time. A run that has finished with the same settings is not run again. Writes DIR/compare.json,
compare.md and compare.png.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import program
from experiments.studies import comparison, results, runs

_CONFIG = flags.DEFINE_string("config", None, "File with get_comparison(), and its argument after a colon.")
_OUTPUT = flags.DEFINE_string("output", None, "Its folder. Default: runs/compare-FILE-ARGUMENT.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds that each row is trained with.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1)
_GIVEN = program.take_overrides()


def main(_) -> int:
    config = program.required(_CONFIG)
    output = pathlib.Path(_OUTPUT.value or runs.default_output("compare", config))
    entries = program.load_and_call(config, "get_comparison", "config")
    columns, seeds = results.columns_of(config, "config"), runs.parse_seeds(_SEEDS.value)
    study = comparison.study(config, entries, seeds, _GIVEN, output, columns)
    runs.refuse_idle(dict(_GIVEN), study.planned)
    program.ensure_folder("output", output)
    return results.carry_out(study, _JOBS.value, output / "compare")


if __name__ == "__main__":
    program.run(main)
