"""Durable state: array files, committed rounds, checkpoints, snapshots and tapes."""
