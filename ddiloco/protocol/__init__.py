"""The Decoupled DiLoCo protocol without I/O: membership, quorums, weights of merges, and waits.

Nothing in this package starts a thread, reads a clock, touches an array or imports anything but the standard
library. A driver passes events and the time to a core, which returns actions.
"""
