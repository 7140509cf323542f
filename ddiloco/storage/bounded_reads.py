"""Reads with a timeout, for disks that may hang, such as network disks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from ddiloco.telemetry.throughput import UNMEASURED

LONGEST = UNMEASURED  # seconds, as for transfers of unmeasured speed

Result = TypeVar("Result")


def bounded(read: Callable[[], Result], what: object) -> Result:
    """The result of `read`, or its exception; runs on a thread of its own, which is abandoned on a hang.

    Raises:
      TimeoutError: it takes longer than LONGEST; the message is one line and names `what` is read.
    """
    answer: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def make() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=make, name="bounded-read", daemon=True).start()
    if not concurrent.futures.wait([answer], LONGEST).done:
        raise TimeoutError(f"{what}: the disk hangs: it was not read within {LONGEST:g} s")
    return answer.result()
