"""The learner's end of the wire."""
