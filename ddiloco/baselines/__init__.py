"""What Decoupled DiLoCo is compared with: one synchronous job without a syncer."""
