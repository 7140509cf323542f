"""Does a recorded run again: `python -m experiments.replay --workdir=DIR [--until=ROUND]`.

Every version of every fragment is compared with the run's, and the parameters at the end with its summary.
--until=STEP or STEP:FRAGMENT stops after that round and writes a checkpoint. With --what_if and
--config.sync.any=value no array is touched: the same steps, joins and losses meet another policy.
"""

from __future__ import annotations

from absl import flags

from experiments.cli import program

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_UNTIL = flags.DEFINE_string(
    "until", None, "Round to stop after, STEP or STEP:FRAGMENT; a checkpoint goes to the folder replay in it."
)
_WHAT_IF = flags.DEFINE_bool("what_if", False, "Meet the policy of --config.sync.any=value; no arrays.")
_OVERRIDES = program.take_overrides()


def main(_) -> int:
    from experiments.studies.replay import again, what_if
    from experiments.studies.replay.recorded import recorded

    if _OVERRIDES and not _WHAT_IF.value:
        raise program.UsageError(
            f"config.{_OVERRIDES[0][0]}: only --what_if goes by other settings than the run"
        )
    if _WHAT_IF.value and _UNTIL.value:
        raise program.UsageError("until: cannot be joined with --what_if")
    with recorded(program.required(_WORKDIR)) as run:
        if _WHAT_IF.value:
            what_if.compare(run, _OVERRIDES)
            return 0
        fragments = run.experiment.sync.num_fragments
        return again.again(run, again.parse_round(_UNTIL.value, fragments) if _UNTIL.value else None)


if __name__ == "__main__":
    program.run(main)
