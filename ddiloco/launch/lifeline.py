"""A pipe from a parent to its children that breaks when the parent dies, however it dies."""

from __future__ import annotations

import os
import threading


class Lifeline:
    """The parent's end. Children inherit `fd`, the other end, and nobody else has this one."""

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def cut(self) -> None:
        """Ends all children that hold on to it, and closes both ends."""
        os.close(self._held)
        os.close(self.fd)


def hold(fd: int) -> None:
    """Ends this process at once when the parent that gave it `fd` is gone."""

    def wait() -> None:
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
