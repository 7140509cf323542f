"""Another process for the other end of a wire, and what it says."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 120.0


@contextlib.contextmanager
def another_process(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `work(pipe, *arguments)` in a fresh process until the block ends; this end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the end of the other process is seen here
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def receive_from(pipe: Connection) -> Any:
    """What the other process says next.

    Raises:
      TimeoutError: it says nothing.
      EOFError: it has ended.
    """
    if not pipe.poll(TIMEOUT):
        raise TimeoutError(f"the other process said nothing in {TIMEOUT:g} s")
    return pipe.recv()
