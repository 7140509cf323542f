"""Settings of runs: each file has `get_config()`, and says what its presets are."""
