"""Decoupled DiLoCo: many independent learners and one syncer pre-train one model."""
