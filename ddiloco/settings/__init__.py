"""Every setting of a run: frozen dataclasses with bounds, checked once."""
