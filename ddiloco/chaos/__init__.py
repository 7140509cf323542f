"""Faults at random, and what must hold all the same: deterministic simulation testing of the protocol."""
