"""Observation of a run: records from its threads, and a monitor for files, plots and the terminal."""
