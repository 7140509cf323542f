"""The syncer's end of the wire."""
