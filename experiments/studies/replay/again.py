"""Replays a recorded run, and compares it with its files."""

from __future__ import annotations

import os
import sys
import time

from ddiloco.protocol.messages import RoundId
from ddiloco.run.recipes import assembly_of
from ddiloco.storage import checkpoints
from ddiloco.telemetry.files import read_json
from ddiloco.training import platform
from experiments.cli import program
from experiments.studies.replay import execution as replay
from experiments.studies.replay.recorded import RecordedRun
from experiments.studies.replay.works import ReplayPlan


def parse_round(text: str, fragments: int) -> RoundId:
    """The round that STEP or STEP:FRAGMENT names, the first for the step's last; raises UsageError."""
    step, colon, fragment = text.partition(":")
    if not step.isdigit() or (colon and not fragment.isdigit()):
        raise program.UsageError(f"until: is {text!r}, but must be STEP or STEP:FRAGMENT")
    return RoundId(int(step), int(fragment) if colon else fragments)


def again(recorded: RecordedRun, until: RoundId | None) -> int:
    """Replays the run, up to a round if one is given, and prints how it compares; the exit code."""
    _compute_alike(recorded.plan)
    experiment, workdir = recorded.experiment, recorded.workdir
    platform.prepare()
    begun = shown_at = time.monotonic()

    def progress(merge) -> None:
        nonlocal shown_at
        if time.monotonic() > shown_at + 5.0:
            shown_at = time.monotonic()
            print(f"step {merge.round.step}/{experiment.train.steps}", flush=True)

    try:
        done = replay.Replay(assembly_of(experiment), recorded.plan, until, progress).run()
    except replay.ReplayMismatch as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    compared = f"{done.merges} versions merged again, {done.compared} of them compared and equal"
    print(f"{compared}; {done.steps} inner steps; {time.monotonic() - begun:.0f} s")
    print(f"step {done.step}: params_sha256 {done.sha256}")
    if until is not None:
        checkpoints.save(workdir / "replay", done.step, experiment, done.params, None)
        print(workdir / "replay" / str(done.step))
        if any(merge.round > until for merges in recorded.plan.merges for merge in merges):
            return 0
    left = read_json(workdir / "summary.json").get("params_sha256")
    if left not in (None, done.sha256):
        print(f"error: the run's params_sha256 is {left}, another", file=sys.stderr)
        return 1
    print("the same as the run's" if left else "the run has left no summary to compare it with")
    return 0


def _compute_alike(plan: ReplayPlan) -> None:
    """Gives XLA as many CPU devices and threads as the learners had, unless the environment says how many."""
    machines = [m for actor in plan.learners if (m := actor.tape.header.machine).platform == "cpu"]
    seen = max((m.visible for m in machines), default=1)
    if threads := max((m.threads for m in machines), default=0):
        os.environ.setdefault("PJRT_NPROC", str(threads))
    given = os.environ.get("XLA_FLAGS", "")
    if seen > 1 and "device_count" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={seen}".strip()
