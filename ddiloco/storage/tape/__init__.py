"""Event tapes: every event of each protocol core, in order, and notes for computing the arrays again."""
