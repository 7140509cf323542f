"""Goodput on published traces: `python -m experiments.traces --trace=FILE [--servers=400] [--spares=22]`.

Prints goodput and uptime of four systems on the fleet of the trace; experiments/studies/goodput/traces.py has
the formats and where they come from. The failure model's times are those that are committed.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

from experiments.cli import program

_TRACE = flags.DEFINE_string("trace", None, "The file of the trace.")
_SERVERS = flags.DEFINE_integer("servers", None, "Servers that were watched, if more than the file names.")
_SPARES = flags.DEFINE_integer("spares", 0, "Servers kept as spares.", lower_bound=0)
_REPLACEMENT = flags.DEFINE_float(
    "replacement_seconds", 0.0, "Until a spare has taken a server's place.", lower_bound=0.0
)
_RESTART = flags.DEFINE_float("restart_seconds", None, "In place of the failure model's.", lower_bound=0.0)
_SYSTEMS = flags.DEFINE_list(
    "systems", ["data_parallel", "elastic_data_parallel", "decoupled:4", "decoupled:8"], "Which systems."
)


def main(_) -> int:
    from ddiloco.goodput.failures import FailureModel
    from experiments.studies.goodput import traces
    from experiments.studies.goodput.systems import system_of

    path = pathlib.Path(program.required(_TRACE))
    if not _SPARES.value:
        program.refuse_flags(["replacement_seconds"], "has no use without --spares")
    try:
        systems = [system_of(label) for label in program.required(_SYSTEMS)]
    except ValueError as error:
        raise program.UsageError(f"systems: {error}") from None
    try:
        with program.os_errors_as_usage("trace", path):
            trace = traces.read_outages(path, _SERVERS.value)
    except ValueError as error:
        raise program.UsageError(f"trace: {error}") from None
    left, needed = trace.servers - _SPARES.value, max(system.num_learners for system in systems)
    if left < needed:
        raise program.UsageError(f"spares: leaves {left} of {trace.servers} servers, but {needed} are needed")
    model = FailureModel(chips_per_slice=8)
    if _RESTART.value is not None:
        model = dataclasses.replace(model, restart_seconds=_RESTART.value)
    print(
        f"{trace.servers} servers, {trace.seconds / traces.DAY:.1f} days, {len(trace.outages)} outages, "
        f"{trace.available:.2%} of their time there"
    )
    for system in systems:
        share, uptime = traces.goodput(system, model, trace, _SPARES.value, _REPLACEMENT.value)
        print(f"{system.label:22} goodput {share:7.2%}  uptime {uptime:7.2%}")
    return 0


if __name__ == "__main__":
    program.run(main)
