"""Training loops of one's own, to start from (docs/your_own.md)."""
