"""How glibc gives out memory: the next step reuses the buffers of the last. Without glibc nothing changes."""

from __future__ import annotations

import contextlib
import ctypes

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -3, -1, -2, -8


def one_arena() -> None:
    """Makes all threads share one arena; to be called while there is only the main thread.

    A thread that began earlier may have made another one, which cannot grow beyond 64 MiB: allocating
    there takes fresh pages for every large buffer. Which of the later threads do so is a matter of luck.
    """
    _set((_ARENA_MAX, 1))


def keep_freed_memory() -> None:
    """Makes glibc reuse the buffers of one step for the next instead of returning them to the system.

    On CPU devices every step would otherwise take its temporaries as fresh pages, a third of the time of the
    tiny preset.
    """
    one_arena()
    _set((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20))


def return_freed() -> None:
    """Returns what has been freed to the system, such as after a start that needed more than what follows."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set(*options: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options:
            mallopt(option, value)
