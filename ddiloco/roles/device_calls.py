"""Calls that may wait for the devices, in a thread of their own: meanwhile their caller can be heard."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeviceCalls:
    """Makes one call after another for one thread, which sees to other things while it waits.

    Its own thread is a daemon: one that a device holds for ever does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the call under way; does not wait for that."""
        self._calls.put(None)

    def wait(
        self, call: Callable[[], Result], seconds: Callable[[], float], meanwhile: Callable[[], None]
    ) -> Result:
        """The result of `call`, or what it raises.

        As long as that is not there, waits for `seconds()`, calls `meanwhile`, and waits again.
        """
        answer: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._calls.put((answer, call))
        while not concurrent.futures.wait([answer], seconds()).done:
            meanwhile()
        return answer.result()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            answer, call = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
