"""Benchmarks: `python -m experiments.bench NAME --output=FILE.json`; ratios taken side by side in one run."""

from __future__ import annotations

import importlib
import json
import sys

from absl import flags

from ddiloco.config import suggestion
from experiments.cli import program
from experiments.cli.tables import markdown

NAMES = ("learner", "merge", "donation", "memory", "snapshot", "tape", "schedules")
NAMES += ("protocol", "guard", "syncer", "fanin", "hosts", "elastic", "accelerator", "receipts")
_FUNCTIONS = {  # of benchmarks that are not `run` of the module of their name
    "guard": "merge:run_guard",
    "donation": "stepping:run_donation",
    "memory": "syncer:run_memory",
    "snapshot": "stepping:run_snapshot",
}

_OUTPUT = flags.DEFINE_string("output", None, "Also write the rows to this JSON file.")
_QUICK = flags.DEFINE_bool(
    "quick", False, "Smaller and shorter: shows that it runs, its figures mean nothing."
)
_SCHEDULES = flags.DEFINE_integer(
    "schedules", 10_000, "Benchmark schedules: how many to explore.", lower_bound=1
)
_FIRST = flags.DEFINE_integer("first", 0, "Benchmark schedules: the first seed.", lower_bound=0)
_SEED = flags.DEFINE_integer(
    "seed", None, "Benchmark schedules: replay this seed's, and print its last events.", lower_bound=0
)
_FAIR = flags.DEFINE_bool(
    "fair",
    False,
    "Benchmark schedules: those in which nothing goes wrong, and all learners' work must count.",
)
_SIZE = flags.DEFINE_enum(
    "size", "400m", ["160m", "400m", "1b"], "Benchmark accelerator: the preset of configs/dense.py."
)
_LEARNERS = flags.DEFINE_integer("learners", 1000, "Benchmark fanin: learners.", lower_bound=1)
_HOSTS = flags.DEFINE_integer("hosts", 1, "Benchmark fanin: hosts of each learner.", lower_bound=1)
_FRAGMENTS = flags.DEFINE_integer("fragments", 24, "Benchmark fanin: P.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 0.5, "Benchmark fanin: steps a second of each learner.", lower_bound=0.01)
_OF = {**dict.fromkeys(("schedules", "first", "seed", "fair"), "schedules"), "size": "accelerator"}
_OF |= dict.fromkeys(("learners", "hosts", "fragments", "rate"), "fanin")


def main(arguments) -> int:
    from ddiloco.training import platform
    from experiments.studies.schedules.ledger import Violation

    if len(arguments) != 2 or arguments[1] not in NAMES:
        if len(arguments) == 2:
            raise program.UsageError(f"{arguments[1]}: no such benchmark; {suggestion(arguments[1], NAMES)}")
        raise program.UsageError(f"name one benchmark of {', '.join(NAMES)}")
    name, output = arguments[1], program.writable_file(_OUTPUT)
    for flag, wanted in _OF.items():
        if name != wanted:
            program.refuse_flags([flag], f"has no use for benchmark {name}; it is for {wanted}")
    if _SEED.value is not None:
        program.refuse_flags(["schedules", "first"], "has no use with --seed, which replays one")
    # The plain average that merging is held against runs as JAX runs it by default.
    platform.prepare(keep_memory=name != "merge")
    more = {
        "schedules": {
            "schedules": _SCHEDULES.value,
            "first": _FIRST.value,
            "seed": _SEED.value,
            "fair": _FAIR.value,
        },
        "accelerator": {"size": _SIZE.value},
        "fanin": {
            "learners": _LEARNERS.value,
            "hosts": _HOSTS.value,
            "fragments": _FRAGMENTS.value,
            "rate": _RATE.value,
        },
    }.get(name, {})
    try:
        module, _, function = _FUNCTIONS.get(name, f"{name}:run").partition(":")
        run = getattr(importlib.import_module(f"experiments.bench.{module}"), function)
        rows = run(quick=_QUICK.value, **more)
    except Violation as violation:
        sys.exit(str(violation))
    if not rows:
        return 0
    names = ("name", "ratio", "measured", "reference", "limit", "unit")
    cells = [[f"{x:.4g}" if isinstance(x := row[name], float) else x for name in names] for row in rows]
    print(markdown(names, cells, align=True))
    if output:
        output.write_text(json.dumps({**rows[0], "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    program.run(main, positional=True)
