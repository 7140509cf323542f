"""Trains a model: `python -m experiments.train --config=configs/dense.py[:preset] --workdir=DIR`."""

from __future__ import annotations

import datetime
import os
import pathlib
import signal
import sys
import threading

from absl import flags

from experiments import cli

_CONFIG = cli.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only say what the run would be; allocates no parameters.")


MADE = ("summary.json", "loss.png", "checkpoints")


def main(_) -> int:
    from ddiloco.runtime import platform
    from ddiloco.runtime.dry_run import describe
    from ddiloco.runtime.experiment import parse
    from ddiloco.runtime.job import run_job

    experiment = parse(_CONFIG.value)
    if _DRY_RUN.value:
        print(describe(experiment))
        return 0
    platform.prepare()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}")
    stop, received = threading.Event(), []

    def leave(number, _) -> None:
        received.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    live = sys.stdout.isatty() and os.environ.get("CI", "") != "true"
    result = run_job(experiment, workdir, stop, live)
    _tell(result, workdir)
    if result.failure is not None:
        print(f"error: {result.failure}", file=sys.stderr)
        return 1
    return 128 + received[0] if received else 0


def _tell(result, workdir: pathlib.Path) -> None:
    s = result.summary
    if result.continuation is not None:
        print(f"\nsample: {result.continuation.rstrip()}\n")
    loss, goodput, uptime = (s.get(name) for name in ("eval_loss", "goodput", "uptime"))
    shares = f"goodput {goodput or 0:.1%}, uptime {uptime or 0:.1%}"
    if loss is None:
        shares = f"{s.get('step')} steps in {s.get('wall_seconds') or 0:.0f} s, {shares}"
    else:
        shares = f"held-out loss {loss:.4f} nats/token, {shares}"
    print(shares)
    print("  ".join(f"{workdir}/{name}" for name in MADE if (workdir / name).exists()))


if __name__ == "__main__":
    cli.run(main)
