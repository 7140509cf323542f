"""How programs that train end: on a signal with everything saved, and with the figures of the run printed."""

from __future__ import annotations

import datetime
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence

from experiments.front import cli

MADE = ("summary.json", "loss.png", "checkpoints")


def stop_on_signals(grace: float = 0.0) -> tuple[threading.Event, list[int]]:
    """An event that SIGINT and SIGTERM set, and a list that they are put in; a second Ctrl-C ends at once.

    `grace` seconds after the first the process ends, whatever is not saved by then; 0: never. What an engine
    kills counts as failed, what ends before counts as preempted. A second SIGTERM changes nothing: engines
    send it to a job's processes from more than one place, and the launcher passes it on.
    """
    stop, received = threading.Event(), []

    def leave(number, _) -> None:
        received.append(number)
        stop.set()
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    if grace:
        numbers, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        threading.Thread(target=_end_late, args=(grace, numbers), name="grace", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one may have come before
    return stop, received


def _end_late(grace: float, numbers: int) -> None:
    """Waits for a signal's number in a pipe: there it is at once, while `leave` waits for what is compiled.

    An operator's word is not in it, nor another host's: for these no engine counts the seconds.
    """
    while (number := os.read(numbers, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        pass
    time.sleep(grace)
    cli.tell(f"not done {grace:g} s after the word to stop: the process ends as it is")
    sys.stdout.flush()
    os._exit(128 + number)


def new_workdir() -> str:
    """The folder of a run that was given none."""
    return f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}"


def tell(result, workdir: pathlib.Path, received: Sequence[int]) -> int:
    """Prints the result of a run of `run_job`; the exit code."""
    s = result.summary
    if result.sample is not None:
        print(f"\nsample: {result.sample.rstrip()}\n")
    loss, goodput, uptime = (s.get(name) for name in ("eval_loss", "goodput", "uptime"))
    shares = f"goodput {goodput or 0:.1%}, uptime {uptime or 0:.1%}"
    if loss is None:
        virtual = "virtual " if s.get("driver") == "virtual" else ""
        shares = f"{s.get('step')} steps in {s.get('wall_seconds') or 0:.0f} {virtual}s, {shares}"
    else:
        shares = f"held-out loss {loss:.4f} nats/token, {shares}"
    early = "" if s.get("finished") else f"ended early, at step {s.get('step')}: "
    print(f"{early}{shares}")
    print("  ".join(f"{workdir}/{name}" for name in MADE if (workdir / name).exists()))
    if result.failure is not None:
        print(f"error: {result.failure}", file=sys.stderr)
        return 1
    return 128 + received[0] if received else 0
