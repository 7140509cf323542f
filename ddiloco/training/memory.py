"""Settings of glibc's allocator: each step reuses the buffers of the last. No effect without glibc."""

from __future__ import annotations

import contextlib
import ctypes

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -3, -1, -2, -8


def one_arena() -> None:
    """Makes all threads share one arena; call it while there is only the main thread.

    An earlier thread may have made another arena, which cannot grow beyond 64 MiB: there every large buffer
    takes fresh pages. Which later threads use it is random.
    """
    _set((_ARENA_MAX, 1))


def keep_freed_memory() -> None:
    """Makes glibc reuse a step's buffers for the next instead of returning them to the system.

    On CPU devices every step would otherwise take fresh pages for its temporaries, a third of the tiny
    preset's time.
    """
    one_arena()
    _set((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20))


def return_freed() -> None:
    """Returns freed memory to the system, as after a start that needed more than training does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set(*options: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options:
            mallopt(option, value)
