"""Benchmarks: `python -m experiments.bench NAME --output=FILE.json`; ratios taken side by side in one run."""

from __future__ import annotations

import importlib
import json
import pathlib

from absl import flags

from experiments import cli

NAMES = ("learner", "merge")

_OUTPUT = flags.DEFINE_string("output", None, "Also write the rows to this JSON file.")
_QUICK = flags.DEFINE_bool(
    "quick", False, "Smaller and shorter: shows that it runs, its figures mean nothing."
)


def main(arguments) -> int:
    from ddiloco.runtime import platform

    if len(arguments) != 2 or arguments[1] not in NAMES:
        raise cli.UsageError(f"name one benchmark of {', '.join(NAMES)}")
    # The plain average that merging is held against runs as JAX runs it by default.
    platform.prepare(keep_memory=arguments[1] != "merge")
    rows = importlib.import_module(f"experiments.bench_{arguments[1]}").run(quick=_QUICK.value)
    print(f"{'name':32} {'ratio':>7} {'measured':>12} {'reference':>12} {'limit':>12}  unit")
    for row in rows:
        figures = f"{row['ratio']:7.3f} {row['measured']:12.4g} {row['reference']:12.4g} {row['limit']:12.4g}"
        print(f"{row['name']:32} {figures}  {row['unit']}")
    if _OUTPUT.value:
        first, *others = rows
        pathlib.Path(_OUTPUT.value).write_text(
            json.dumps({**first, "rows": [first, *others]}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    cli.run(main, positional=True)
