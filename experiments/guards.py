"""What the guard does: `python -m experiments.guards --output=FILE.json` has one of eight learners lie.

Each way of lying is tried in virtual time with the guard and without it, and held against the run that the
last learner takes no part in: seven honest ones. Prints a table. `--liars=2` has the last two lie alike;
`--lies` names some of the ways, `--rules` the merge rules to try it with. Outcome: docs/results/guards.md.
"""

from __future__ import annotations

import dataclasses
import json

from absl import flags

from experiments.cli import program
from experiments.cli.tables import markdown

_CONFIG = program.define_config("configs/micro.py")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the outcomes to this JSON file.")
_LIES = flags.DEFINE_list("lies", None, "Ways of lying; all by default.")
_RULES = flags.DEFINE_list("rules", None, "Merge rules to try; the config's by default.")
_LIARS = flags.DEFINE_integer("liars", 1, "How many lie, the last ones.", lower_bound=1, upper_bound=7)
_LEARNERS = 8


def main(_) -> int:
    from ddiloco.outer.merging import MERGE_RULES
    from ddiloco.training import platform
    from experiments.studies import byzantine

    output = program.writable_file(_OUTPUT)
    ways = _LIES.value or list(byzantine.KINDS)
    for flag, names, known in (("lies", ways, byzantine.KINDS), ("rules", _RULES.value or [], MERGE_RULES)):
        for name in names:
            if name not in known:
                raise program.UsageError(f"{flag}: no {name!r}; there are {', '.join(known)}")
    experiment = _CONFIG.experiment({"sync.num_learners": _LEARNERS}, driver="virtual")
    if experiment.eval.every is None:
        raise program.UsageError("config.eval.every: is None, but what lies do is a score")
    if _RULES.value and program.has_override("outer.merge"):
        raise program.UsageError("config.outer.merge: has no use with --rules, which says which there are")
    byzantine.without_the_last(experiment)  # refuses what cannot be so before anything runs
    platform.prepare()
    guarded, liars = {}, range(_LEARNERS - _LIARS.value, _LEARNERS)
    for rule in _RULES.value or [experiment.outer.merge]:
        outer = dataclasses.replace(experiment.outer, merge=rule)
        with_rule = dataclasses.replace(experiment, outer=outer)
        guarded[rule] = byzantine.without_gates(with_rule)
        guarded[f"{rule}, guard"] = with_rule
    rows, found = [], {}
    for label, settings in guarded.items():
        alone = byzantine.run(byzantine.without_the_last(settings), {})
        for way in [None, *ways]:
            got = byzantine.run(settings, {} if way is None else dict.fromkeys(liars, way))
            found[f"{label}: {way or 'all honest'}"] = dataclasses.asdict(got)
            worse = f"{100 * (got.loss / alone.loss - 1):+.2f}%"
            left_out = ", ".join(f"{n} of learner {m}" for m, n in sorted(got.left_out.items())) or "-"
            rows.append([label, way or "all honest", f"{got.loss:.4f}", worse, f"{got.offers}", left_out])
            program.print_err(f"{label}, {rows[-1][1]}: {rows[-1][2]} ({worse})")
        found[f"{label}: without it"] = dataclasses.asdict(alone)
        rows.append([label, "without it", f"{alone.loss:.4f}", "", f"{alone.offers}", "-"])
    print(markdown(["merged by", "the eighth learner", "loss", "", "offers", "left out"], rows, align=True))
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
