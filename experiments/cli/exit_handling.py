"""The end of training programs: signals, with everything saved, and the printed figures of the run."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from ddiloco.telemetry import terminal
from experiments.cli import program, streams

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_OTHERS = {signal.SIGTERM, signal.SIGHUP}  # an engine's, a terminal's that closes
MADE = ("summary.json", "loss.png", "checkpoints")


def stop_on_signals(grace: float = 0.0, saving: str = "") -> tuple[threading.Event, list[int]]:
    """An event that SIGINT, SIGTERM and SIGHUP set, and a list of the received signals.

    A second Ctrl-C ends the process at once. SIGHUP stays ignored under `nohup`. From now on output errors
    are ignored.

    `saving`: a message for the first Ctrl-C; empty: none.

    `grace`: seconds after the first signal until the process ends, saved or not; 0: no limit. Engines count a
    killed process as failed, and one that ends in time as preempted. A second SIGTERM changes nothing:
    engines send it from more than one place, and the launcher passes it on.
    """
    streams.best_effort()
    stop, received = threading.Event(), []
    numbers, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in _SIGNALS:
        if not _ignored(number):
            signal.signal(number, lambda *_: None)  # the pipe has its number by then
    arguments = numbers, stop, received, grace, saving
    threading.Thread(target=_listen, args=arguments, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_OTHERS)  # one may have come before
    return stop, received


def comes_back(resume: bool | int | None, received: Sequence[int]) -> bool:
    """Whether another process will go on with the run that these signals end.

    Who asks for `--resume=auto` (None) starts another; an operator's order, and a Ctrl-C, are for the run.
    """
    return resume is None and bool(OF_OTHERS & {*received})


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Within it the first SIGTERM or SIGHUP raises Interrupted in the main thread.

    From then on output errors are ignored.
    """
    streams.best_effort()
    numbers = [number for number in OF_OTHERS if not _ignored(number)]

    def interrupt(number: int, _) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise program.Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Processes started within it do not receive SIGHUP."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignored(number: int) -> bool:
    """Whether it is SIGHUP, ignored since the program started, as under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _listen(numbers: int, stop: threading.Event, received: list[int], grace: float, saving: str) -> None:
    """Waits for signals' numbers in a pipe: they come at once, while a handler waits for what is compiled.

    Orders of an operator or of another host are not in it: for these no engine counts the seconds of grace.
    """
    while True:
        number = os.read(numbers, 1)[0]
        if number not in _SIGNALS:
            continue
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)
        if grace and not received:
            late = threading.Timer(grace, _end_late, (grace, number))
            late.daemon = True
            late.start()
        received.append(number)
        stop.set()
        if number == signal.SIGINT and saving:
            line = terminal.printable(f"{saving}; a second Ctrl-C ends this at once, unsaved")
            below = "\n" if sys.stderr.isatty() else ""  # a live line, and what the terminal makes of Ctrl-C
            terminal.print_line(below + line, sys.stderr)


def _end_late(grace: float, number: int) -> None:
    program.print_err(f"not done {grace:g} s after the order to stop: the process ends as it is")
    sys.stdout.flush()
    os._exit(128 + number)


def new_workdir() -> str:
    """The folder of a run without --workdir."""
    return f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}"


def print_result(result, workdir: pathlib.Path, received: Sequence[int]) -> int:
    """Prints the result of a run of `run_job`; the exit code."""
    s = result.summary
    if result.sample is not None:
        print(f"\nsample: {result.sample.rstrip()}\n")
    loss, goodput, uptime = (s.get(name) for name in ("eval_loss", "goodput", "uptime"))
    shares = f"goodput {goodput or 0:.1%}, uptime {uptime or 0:.1%}"
    if loss is None and s.get("eval_history"):  # JSON has no NaN
        shares = f"held-out loss is not finite, {shares}"
    elif loss is None:
        virtual = "virtual " if s.get("driver") == "virtual" else ""
        shares = f"{s.get('step')} steps in {s.get('wall_seconds') or 0:.0f} {virtual}s, {shares}"
    else:
        scored = s["eval_history"][-1]["step"]  # an earlier one, if another process will go on
        at = "" if scored == s.get("step") else f" at step {scored}"
        shares = f"held-out loss {loss:.4f} nats/token{at}, {shares}"
    early = "" if s.get("finished") else f"ended early, at step {s.get('step')}: "
    print(f"{early}{shares}")
    print("  ".join(f"{workdir}/{name}" for name in MADE if (workdir / name).exists()))
    if result.failure is not None:
        print(f"error: {result.failure}", file=sys.stderr)
        return 1
    return 128 + received[0] if received else 0
