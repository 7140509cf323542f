"""Plans of a run: other settings on the same fleet."""
