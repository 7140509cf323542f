"""Whether a run should retime itself: `python -m experiments.adapting --output=FILE.json`.

Twelve fleets in virtual time, of which half change half-way. Each is played with intervals that stay, and
with a controller that considers those of experiments.plan on what it has measured lately. The table has, for
each half, the points of the estimated loss by which the default and the controller are above the best.
Outcome: docs/results/merged_share.md.
"""

from __future__ import annotations

import dataclasses
import json

from absl import flags

from experiments.cli import program

_OUTPUT = flags.DEFINE_string("output", None, "Also write all courses to this JSON file.")
_FLEETS = flags.DEFINE_integer("fleets", None, "Only so many of the fleets, the first.", lower_bound=1)

COLUMNS = ("fleet", "best H", "the default", "the controller", "changes")


def main(_) -> int:
    from ddiloco.settings.experiment import parse
    from experiments.cli.tables import markdown
    from experiments.studies.planning.adapting import courses
    from experiments.studies.planning.fleets import FLEETS, LEARNERS

    output = program.writable_file(_OUTPUT)
    config = program.load_config("configs/links.py:counted")
    config.sync.num_learners = LEARNERS
    experiment = parse(config)
    found, rows = {}, []
    for name in list(FLEETS)[: _FLEETS.value]:
        found[name] = courses(experiment, FLEETS[name])
        rows.append(_row(name, found[name], str(experiment.sync.interval)))
        program.print_err(" | ".join(rows[-1]))
    print(markdown(COLUMNS, rows, align=True))
    if output:
        values = {
            name: {kind: dataclasses.asdict(course) for kind, course in of_it.items()}
            for name, of_it in found.items()
        }
        output.write_text(json.dumps(values, indent=2) + "\n")
    return 0


def _row(name: str, courses, default: str) -> list[str]:
    still = {kind: course for kind, course in courses.items() if kind != "plan"}
    best = [min(still, key=lambda kind: still[kind].losses[half]) for half in (0, 1)]

    def gaps(kind: str) -> str:
        each = (courses[kind].losses[half] - still[best[half]].losses[half] for half in (0, 1))
        return ", ".join(f"{gap:+.2f}" for gap in each)

    changes = ", ".join(f"{interval} at {time:.0f} s" for time, interval, _ in courses["plan"].changes)
    return [name, ", ".join(best), gaps(default), gaps("plan"), changes or "none"]


if __name__ == "__main__":
    program.run(main)
