"""Turns a config into a run and everything that the run writes."""
