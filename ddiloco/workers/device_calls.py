"""Calls that may wait for the devices, in a thread of their own: their caller stays responsive."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeviceCalls:
    """Makes one call after another for one thread, which can do other things while it waits.

    Its thread is a daemon: if a device never answers, the process can still end.
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

        Until the result is there it waits for `seconds()`, calls `meanwhile`, and waits again.
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
