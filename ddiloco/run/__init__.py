"""Where a config becomes a run with everything that it leaves."""
