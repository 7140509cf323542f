"""Baselines of Decoupled DiLoCo: one synchronous job without a syncer."""
