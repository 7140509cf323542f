"""Starts programs as processes of this machine, forked from one that has imported everything.

Imports are more than half of the processor time of a start. `multiprocessing` has the fork server, exit codes
and signals, and a child can notice the end of its parent. But its children call a function; this module
makes them like commands, with their own arguments, environment, standard streams and session.
Outside Linux each process imports for itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess

PRELOADED = (
    "ddiloco.launch.first_import",
    "ddiloco.data.preparation",
    "ddiloco.data.stdlib_text",
    "ddiloco.run.job",
    "ddiloco.remote.evaluator",
    "ddiloco.remote.learner.process",
    "ddiloco.remote.syncer.process",
    "ddiloco.tasks.captioning",
    "ddiloco.tasks.classification",
    "ddiloco.tasks.language_modelling",
    "ddiloco.training.platform",
    "matplotlib.backends.backend_agg",
    "ml_collections.config_flags",
    "tensorboardX",
    "tensorflow_datasets.core.data_sources.array_record",
)
NICENESS = 2  # of programs that are under way: two thirds of the share of one that begins
_FORKS = sys.platform == "linux"
_context = multiprocessing.get_context("forkserver" if _FORKS else "spawn")


def warm_up() -> None:
    """Starts the fork server unless it runs; it imports in the background, and ends with the caller."""
    if not _FORKS:
        return
    _context.set_forkserver_preload(PRELOADED)
    # A Ctrl-C is for the caller alone. A SIGTERM may be for all processes of a job, a SIGHUP for all in the
    # foreground of a terminal that closes: each program takes them once it can, and the server, with which
    # they would end, outlives them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()  # else the server would start it, which unblocks the other signals
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: connection.Connection | None = None,
    quiet: bool = False,
) -> BaseProcess:
    """Runs a module as `python -m` would, in a session of its own; it ends when the caller does.

    A SIGTERM or SIGHUP waits until the module unblocks it (`experiments/cli/exit_handling.py`).

    Only one thread may start processes and ask for exit codes: `multiprocessing` can read each code once.

    Args:
      environment: all of it.
      stdin: the reading end of a pipe, as its standard input, or None for an empty one.
      quiet: whether its standard output goes nowhere, or where that of the fork server goes.
    """
    process = _context.Process(
        target=_run, args=(module, list(arguments), dict(environment), stdin, quiet), name=module
    )
    # A child imports the caller's __main__, whose flags would clash with its own: it gets an empty one.
    program, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        _start(process)
    finally:
        sys.modules["__main__"] = program
    return process


def share_of_threads(environment: Mapping[str, str], sharers: int) -> dict[str, str]:
    """The environment of one of so many processes, in which XLA computes in its share of this one's cores.

    With more threads, a step on CPU waits for those that lost their core to another process. Large sums are
    split by the number of threads, so a replay uses the same. PJRT_NPROC and NPROC have precedence.
    """
    threads = max(1, _own_cores() // sharers)
    return {"PJRT_NPROC": environment.get("NPROC", str(threads)), **environment}


def _own_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(process: BaseProcess) -> None:
    """A server that has just died may still seem to be there; a later attempt starts another."""
    for pause in (0.05, 0.2, 1.0, None):
        warm_up()
        try:
            process.start()
            return
        except (EOFError, ConnectionError):
            if pause is None:
                raise
            time.sleep(pause)


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdin: connection.Connection | None,
    quiet: bool,
) -> None:
    gc.freeze()  # else the first collection would copy the pages shared with the fork server
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    os.setsid()  # a Ctrl-C is for the parent, which passes it on in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        sys.stdin = os.fdopen(0)
    if quiet:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    _configure_jax(before)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def make_way() -> None:
    """Lowers the priority of this program, if `start` began it, so that those that begin later catch up.

    Where the system gives each session its share of the processor, the session's priority counts.
    """
    if multiprocessing.parent_process() is None or not _FORKS:
        return
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/autogroup").write_text(str(NICENESS))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, for whatever reason.

    Also when the fork server has: it alone receives the exit codes of its children.
    """
    sentinels = [multiprocessing.parent_process().sentinel]
    if _FORKS:
        sentinels.append(os.pidfd_open(os.getppid()))
    connection.wait(sentinels)
    os._exit(1)


def _configure_jax(before: Mapping[str, str]) -> None:
    """Applies JAX_* again: JAX read them when it was imported, in the fork server's environment."""
    if "jax" not in sys.modules:
        return
    import jax

    for option, value in jax.config.values.items():
        given = os.environ.get(option.upper())
        if given is None or given == before.get(option.upper()):
            continue
        if isinstance(value, bool):
            jax.config.update(option, given.lower() in ("y", "yes", "t", "true", "on", "1"))
        else:
            jax.config.update(option, type(value)(given) if isinstance(value, int | float) else given)
