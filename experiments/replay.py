"""Does a recorded run again: `python -m experiments.replay --workdir=DIR [--until=ROUND]`.

Every version of every fragment is compared with the run's, and the parameters at the end with its summary.
--until=STEP or STEP:FRAGMENT stops after that round and writes a checkpoint. With --what_if and
--config.sync.any=value no array is touched: the same steps, joins and losses meet another policy.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import sys
import time

from absl import flags

from experiments.front import cli

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_UNTIL = flags.DEFINE_string(
    "until", None, "Round to stop after, STEP or STEP:FRAGMENT; a checkpoint goes to the folder replay in it."
)
_WHAT_IF = flags.DEFINE_bool("what_if", False, "Meet the policy of --config.sync.any=value; no arrays.")
_OVERRIDES = cli.take_overrides()


def main(_) -> int:
    from ddiloco.disk.tape.file import TapeError
    from ddiloco.disk.tape.reading import read_run

    if not _WORKDIR.value:
        raise cli.UsageError("workdir: is missing; give --workdir=DIR, the folder of a run")
    if _OVERRIDES and not _WHAT_IF.value:
        raise cli.UsageError(f"config.{_OVERRIDES[0][0]}: only --what_if goes by other settings than the run")
    if _WHAT_IF.value and _UNTIL.value:
        raise cli.UsageError("until: cannot be joined with --what_if")
    workdir = pathlib.Path(_WORKDIR.value)
    try:
        from ddiloco.replay.run import recorded_experiment

        experiment = recorded_experiment(workdir)
        tapes = read_run(workdir)
        for warning in tapes.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return _other_policy(experiment, tapes) if _WHAT_IF.value else _again(experiment, tapes, workdir)
    except TapeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _again(experiment, tapes, workdir: pathlib.Path) -> int:
    _see_as_many_devices(tapes)
    from ddiloco.disk import checkpoints
    from ddiloco.replay import run as replay
    from ddiloco.run.recipes import assembly_of
    from ddiloco.training import platform

    until = _round(_UNTIL.value, experiment.sync.num_fragments)
    plan = replay.make_plan(experiment, tapes)
    snapshot = replay.first_snapshot(plan, workdir)
    platform.prepare()
    begun = time.monotonic()
    told = [0.0]

    def progress(merge) -> None:
        if time.monotonic() > told[0] + 5.0:
            told[0] = time.monotonic()
            print(f"step {merge.round.step}/{experiment.train.steps}", flush=True)

    try:
        done = replay.replay(assembly_of(experiment), plan, until, progress, snapshot)
    except replay.ReplayMismatch as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{done.merges} versions merged anew, {done.compared} of them compared and equal; {done.steps} inner "
        f"steps; {time.monotonic() - begun:.0f} s"
    )
    print(f"step {done.step}: params_sha256 {done.sha256}")
    if until is not None:
        folder = workdir / "replay"
        checkpoints.save(folder, done.step, experiment, done.params, None)
        print(folder / str(done.step))
        return 0
    recorded = replay.recorded_sha256(workdir)
    if recorded is None:
        print("the run has left no summary to compare it with")
        return 0
    if recorded != done.sha256:
        print(f"error: the run's params_sha256 is {recorded}, another", file=sys.stderr)
        return 1
    print("the same as the run's")
    return 0


def _other_policy(experiment, tapes) -> int:
    from ddiloco.config import build, to_dict
    from ddiloco.protocol.policy import SyncPolicy
    from ddiloco.replay import run as replay
    from experiments.studies.replay import what_if

    changes = {}
    for path, value in _OVERRIDES:
        group, _, name = path.partition(".")
        if group != "sync" or name == "num_learners":
            raise cli.UsageError(f"config.{path}: --what_if changes config.sync, but for num_learners")
        changes[name] = _value(value)
    policy = build(SyncPolicy, {**to_dict(experiment.sync), **changes}, "config.sync")
    plan = replay.make_plan(experiment, tapes)
    steps = experiment.train.steps
    columns = {
        "recorded": what_if.recorded(plan),
        "same policy": what_if.what_if(plan, experiment.sync, steps),
        "what if": what_if.what_if(plan, policy, steps),
    }
    print(", ".join(f"{name}={value}" for name, value in changes.items()) or "nothing is changed")
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for field in dataclasses.fields(what_if.Outcome):
        values = [getattr(outcome, field.name) for outcome in columns.values()]
        print(f"{field.name:18}" + "".join(f"{value:14.6g}" for value in values))
    return 0


def _see_as_many_devices(tapes) -> None:
    """Simulates as many CPU devices as the learners saw, unless $XLA_FLAGS says how many."""
    machines = [tape.header.machine for lives in tapes.learners.values() for tape in lives]
    seen = max((m.visible for m in machines if m.platform == "cpu"), default=1)
    given = os.environ.get("XLA_FLAGS", "")
    if seen > 1 and "device_count" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={seen}".strip()


def _round(told: str | None, fragments: int):
    from ddiloco.protocol.messages import RoundId

    if told is None:
        return None
    step, colon, fragment = told.partition(":")
    if not step.isdigit() or (colon and not fragment.isdigit()):
        raise cli.UsageError(f"until: is {told!r}, but must be STEP or STEP:FRAGMENT")
    return RoundId(int(step), int(fragment) if colon else fragments)


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    cli.run(main)
