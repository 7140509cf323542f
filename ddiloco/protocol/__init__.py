"""The Decoupled DiLoCo protocol without I/O: who merges when, with what weights, and who waits for whom.

Nothing in this package starts a thread, reads a clock, touches an array or imports anything but the
standard library. A driver tells a core what happened and when; the core answers what to do.
"""
