"""Real processes and a seeded killer: `python -m experiments.chaos --config=FILE --workdir=DIR`.

The config file has `get_config(preset)`, of the run, and `get_chaos(preset)`, of what befalls it; settings of
the latter are given as --chaos.field=value. Every learner reaches the syncer through a proxy of its own, in
which partitions are made. Leaves in DIR: faults.jsonl, chaos.json, chaos.md, chaos.png, the run in job/, and
with --undisturbed a run of as many tokens without faults in undisturbed/. Exit code 1 if an outer step was
lost, or a token counted twice, or there was a time at which no learner stepped.
"""

from __future__ import annotations

import json
import sys

from absl import flags

from experiments.cli import exit_handling, program

_CONFIG = program.define_config("configs/chaos_processes.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_UNDISTURBED = flags.DEFINE_bool("undisturbed", False, "Then train on as many tokens without faults.")
_GIVEN = program.take_overrides("chaos")
_MADE = ("job", "undisturbed", "faults.jsonl", "undisturbed.jsonl", "chaos.json", "chaos.md", "chaos.png")


def main(_) -> int:
    from ddiloco.config import REFUSED, build
    from ddiloco.run.job import set_aside
    from experiments.studies import figures as drawn
    from experiments.studies.chaos import checks_after, storm
    from experiments.studies.chaos.processes import ProcessChaos, draw_plan

    experiment = _CONFIG.experiment()
    if experiment.driver != "remote":
        raise program.UsageError(f"config.driver: is {experiment.driver}, but must be remote")
    chaos = dict(program.load_and_call(program.chosen_config(), "get_chaos", "config"))
    chaos |= {name: program.parse_literal(text) for name, text in _GIVEN}
    settings = build(ProcessChaos, chaos, "chaos")
    honest = experiment.sync.num_learners - settings.hostile
    if not honest:
        raise program.UsageError("chaos.hostile: takes a learner's place, but config.sync.num_learners is 1")
    plan = draw_plan(settings, honest)
    workdir = program.ensure_folder("workdir", _WORKDIR.value or exit_handling.new_workdir())
    with program.os_errors_as_usage("workdir", workdir):
        set_aside(workdir, _MADE)
    stop, received = exit_handling.stop_on_signals(saving=f"saving model and summary in {workdir}")
    journal = workdir / "faults.jsonl"
    figures, trace, code = storm.run(experiment, workdir / "job", journal, plan, stop, honest=honest)
    if code == REFUSED:
        return code
    if not code and _UNDISTURBED.value:
        quiet, overrides = storm.undisturbed(experiment, figures, honest)
        journal = workdir / "undisturbed.jsonl"
        alone = storm.run(quiet, workdir / "undisturbed", journal, (), stop, overrides)
        figures, code = checks_after.compared(figures, alone.figures), alone.code
    (workdir / "chaos.json").write_text(json.dumps(figures, indent=2) + "\n")
    (workdir / "chaos.md").write_text(checks_after.table(figures) + "\n")
    drawn.draw_lanes(workdir / "chaos.png", trace)
    print(checks_after.table(figures))
    print(f"{workdir}/chaos.json  {workdir}/chaos.png")
    if received or code:
        return 128 + received[0] if received else code
    problems = checks_after.problems(figures)
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    program.run(main)
