"""Learners and syncer as processes: the wire between them, their roles, and who supervises them."""
