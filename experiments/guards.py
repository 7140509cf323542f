"""What the guard does: `python -m experiments.guards --output=FILE.json` has one of eight learners lie.

Each way of lying is tried in virtual time with the guard and without it, and held against the run that the
last learner takes no part in: seven honest ones. Prints a table. `--liars=2` has the last two lie alike;
`--lies` names some of the ways, `--rules` the merge rules to try it with. Outcome: docs/results/security.md.
"""

from __future__ import annotations

import dataclasses
import json

from absl import flags

from experiments.cli import program

_CONFIG = program.define_config("configs/micro.py")
_OUTPUT = flags.DEFINE_string("output", None, "Also write the outcomes to this JSON file.")
_LIES = flags.DEFINE_list("lies", None, "Ways of lying; all by default.")
_RULES = flags.DEFINE_list("rules", None, "Merge rules to try; the config's by default.")
_LIARS = flags.DEFINE_integer("liars", 1, "How many lie, the last ones.", lower_bound=1, upper_bound=7)
_LEARNERS = 8


def main(_) -> int:
    from ddiloco.outer.merging import MERGE_RULES
    from ddiloco.telemetry.scalars import as_json
    from ddiloco.training import platform
    from experiments.studies import byzantine, comparison, results

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
    guarded, liars, records = {}, range(_LEARNERS - _LIARS.value, _LEARNERS), []
    for rule in _RULES.value or [experiment.outer.merge]:
        outer = dataclasses.replace(experiment.outer, merge=rule)
        with_rule = dataclasses.replace(experiment, outer=outer)
        guarded[rule] = byzantine.without_gates(with_rule)
        guarded[f"{rule}, guard"] = with_rule
    for merged_by, settings in guarded.items():
        tried = {"without it": (byzantine.without_the_last(settings), {}), "all honest": (settings, {})}
        tried |= {way: (settings, dict.fromkeys(liars, way)) for way in ways}
        for way, lying in tried.items():
            got = byzantine.run(*lying)
            records.append(
                {
                    "merged by": merged_by,
                    "the eighth learner": way,
                    "label": f"{merged_by}: {way}",
                    "against": f"{merged_by}: without it",
                    "seed": experiment.seed,
                    "finished": True,
                    "eval_loss": got.loss,
                    "left_out": sum(got.left_out.values()),
                    "honest_left_out": sum(n for m, n in got.left_out.items() if m not in liars),
                    "outcome": dataclasses.asdict(got),
                }
            )
            program.print_err(f"{merged_by}, {way}: {got.loss:.4f}")
    frame = results.completed(records, comparison.held_against)
    columns = ("eval_loss", "gap", "left_out", "honest_left_out")
    print(results.table(frame, ["merged by", "the eighth learner"], columns))
    if output:
        output.write_text(json.dumps(as_json(frame.to_dict("records")), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
