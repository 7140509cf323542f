"""Goodput of systems of any number of chips, and the failure model's calibration."""
