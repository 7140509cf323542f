"""What outlives a process: array files, committed rounds, checkpoints, snapshots and tapes."""
