"""What Decoupled DiLoCo is held against: one synchronous job without a syncer."""
