"""Faults of real processes, and the report of a run under them."""
