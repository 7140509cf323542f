"""Imported first by the fork server: its settings are those of all programs that it forks.

A thread that a later import starts may allocate, and would make a second arena that every program inherits.
"""

from __future__ import annotations

from ddiloco.training.memory import one_arena

one_arena()
