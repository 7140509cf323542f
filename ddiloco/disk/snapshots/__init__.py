"""Consistent snapshots of a whole run on disk, and what may change between one and going on from it."""
