"""Questions put to a recorded run: what happened when, and what another policy would have come to."""
