"""Questions put to recorded runs."""
